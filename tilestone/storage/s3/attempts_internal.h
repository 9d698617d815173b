// One request to S3, signed and sent until an answer counts.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/storage/s3/answers.h"
#include "tilestone/storage/s3/client.h"
#include "tilestone/storage/s3/credentials.h"
#include "tilestone/storage/s3/http.h"

namespace tilestone::s3 {

// An operation of S3's API, and the permission that it needs.
struct Action {
  const char* name;
  const char* permission;
};

struct Request {
  Action action;
  std::string method;
  std::string key;  // "": the bucket
  Query query = {};
  Headers headers = {};
  std::vector<ByteView> body = {};
  std::string document = {};  // the body, if not empty
  MutableByteView into = {};
  std::vector<int> accepted = {};  // statuses besides 2xx that are results
  bool answers_xml = false;        // the body of a 2xx must be a document, and no Refusal
};

// "PutObject s3://bucket/key".
std::string name_of(const Request& request, const std::string& bucket);

// What an answer is good for.
enum class Verdict {
  kDone,
  kAgain,        // after a pause, until the deadline
  kDamaged,      // on its way to the store or back: again, a few times
  kCredentials,  // they have expired
  kRegion,       // the bucket is elsewhere
  kClock,        // this machine's clock is wrong
  kFailed,
};
Verdict judge(const Request& request, const HttpAnswer& answer, const Refusal& refusal);
// The error that an answer means, or the answers before a deadline.
Error refused(const Request& request, const std::string& bucket, const HttpAnswer& answer,
              const Refusal& refusal);

// With what an attempt was signed. Others may have corrected the place when its answer arrives.
struct Signature {
  Keys keys;
  std::string origin;  // "https://host"
  std::string region;
  std::chrono::seconds clock_offset{0};
};

// How a bucket is reached now. Only Http's thread uses it.
class Place {
 public:
  Place(const Config& config, std::string bucket);

  // nullopt: there are no credentials yet.
  std::optional<HttpRequest> signed_request(const Request& request, Signature& used);
  // These take what the answer to an attempt says. False: another attempt would be signed alike.
  bool take_region(const HttpAnswer& answer, const Refusal& refusal, const Signature& used);
  bool take_clock(const HttpAnswer& answer, const Signature& used);
  bool renew_credentials(const Signature& used) { return credentials_.renew(used.keys); }
  std::string credentials_problem() { return credentials_.problem(); }

  const Config config;
  const std::string bucket;
  bool has_answered = false;
  // Until then an endpoint that has never answered is not asked again, after a request to it was
  // given up. So a command that looks at many objects gives up once.
  Deadline::Clock::time_point silent_until;
  std::string silence;  // in words
  Deadline::Clock::time_point next_log;

 private:
  std::string base_url() const;
  std::string path_of(const std::string& key) const;
  bool in_path() const;

  std::string region_;
  std::chrono::seconds clock_offset_{0};
  CurrentCredentials credentials_;
};

class Attempts : public Exchange {
 public:
  Attempts(Place& place, Http& http, Request request, Deadline deadline, AtEnd at_end = {});

  // On the caller's thread.
  Answer wait();
  void give_up() noexcept;  // and waits until the memory is free

  void check() override;
  std::optional<HttpRequest> next() override;
  std::optional<std::chrono::nanoseconds> answered(HttpAnswer answer) override;
  void ended(std::exception_ptr error) override;

 private:
  using Pause = std::optional<std::chrono::nanoseconds>;
  Pause decide(Verdict verdict, const HttpAnswer& answer, const Refusal& refusal);
  std::chrono::nanoseconds pause();
  void note_problem(const HttpAnswer& answer, const Refusal& refusal);
  bool has_no_contact() const;
  Error give_up_contact();

  Http& http_;
  // Of Http's thread, from start() to ended().
  Place& place_;
  const Request request_;
  const Deadline deadline_;
  const AtEnd at_end_;
  Deadline::Clock::time_point begun_;  // the first attempt
  std::minstd_rand chance_{std::random_device{}()};
  int attempts_ = 0, damaged_ = 0, corrections_ = 0;
  std::string problem_;  // of the last attempt, in words
  std::string last_;     // of its connection
  Signature used_;       // by the last attempt

  const pid_t process_;
  std::atomic<bool> given_up_ = false;
  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  bool ended_ = false;
  std::exception_ptr error_;
  Answer answer_;
};

}  // namespace tilestone::s3
