// HTTP over libcurl. Http has many requests in progress on one thread of its own; fetch() does one,
// on the caller's.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/storage/s3/sign.h"

namespace tilestone::s3 {

struct HttpRequest {
  std::string method;
  std::string url;  // as it is sent: encoded, nothing is normalised
  Headers headers;
  std::vector<ByteView> body = {};  // sent one after the other, from this memory
  MutableByteView into = {};        // if not empty, receives the body of a 2xx
};

// Why there is no whole answer.
enum class Failure {
  kNone,
  kUnreachable,  // no connection: nothing was sent
  kLost,         // the server may have executed the request
  kPermanent,    // another attempt would fail too: a certificate, a URL
};

struct HttpAnswer {
  Failure failure = Failure::kNone;
  std::string problem;  // libcurl's words for the failure
  int status = 0;
  Headers headers;
  std::string body;     // what was not received into `into`: at most kMaxAnswer bytes
  size_t received = 0;  // bytes in `into`

  std::string header(const std::string& name) const;  // "": none
};

// The longest answer that is kept in a buffer: a list of 1,000 keys of 1,024 bytes, each byte
// encoded as three, has less.
inline constexpr size_t kMaxAnswer = 16 << 20;

struct HttpSettings {
  std::string ca_bundle = {};                 // a file; "": libcurl's default
  std::chrono::seconds stall{60};             // without a byte for so long: kLost
  std::chrono::milliseconds connect{10'000};  // to resolve the name and connect
  std::chrono::milliseconds whole{0};         // of a request; 0: no limit
  std::string proxy = {}, no_proxy = {};      // a URL and hosts, as curl's variables have them
  std::stop_token stop = {};                  // ends a request within a second: kLost
};

// One request, once. Does not throw for what the network does.
HttpAnswer fetch(HttpRequest request, const HttpSettings& settings);

// What Http does, again and again until it ends. Its thread alone calls these: one that waits holds
// up all others.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // Throws if the exchange must end now: deadline, interrupt. Called at least every 50 ms.
  virtual void check() = 0;
  // The next attempt, whose memory must stay until ended(). nullopt: it must wait, and is asked
  // again soon.
  virtual std::optional<HttpRequest> next() = 0;
  // The pause before the next attempt; nullopt: there is none.
  virtual std::optional<std::chrono::nanoseconds> answered(HttpAnswer answer) = 0;
  // The last call. The error is what one of the others threw; null: answered() returned nullopt.
  virtual void ended(std::exception_ptr error) = 0;
};

// Belongs to the process that made it: see base/per_process.h.
class Http {
 public:
  // in_progress: attempts at once; further exchanges wait for their turn.
  Http(HttpSettings settings, size_t in_progress);
  // Ends the exchanges that are left with Error(kInterrupted).
  ~Http();
  Http(const Http&) = delete;
  Http& operator=(const Http&) = delete;

  // These from any thread.
  void start(std::shared_ptr<Exchange> exchange);
  // Calls check() of all exchanges now.
  void check_now();

 private:
  class Loop;
  const std::unique_ptr<Loop> loop_;
};

}  // namespace tilestone::s3
