// For tests: an HTTP server on this machine, whose answers a test makes, and a proxy that damages
// what passes between a client and a real server.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/storage/s3/http.h"

namespace tilestone::s3 {

struct ServedRequest {
  std::string method;
  std::string target;  // as sent: "/bucket/key?uploads="
  Headers headers;     // names in lower case
  std::string body;

  bool has(std::string_view text) const { return target.find(text) != std::string::npos; }
};

struct ServedAnswer {
  int status = 200;
  // Besides these, a length and an ETag. One whose value is "" is left out.
  Headers headers = {};
  std::string body = {};
  std::optional<size_t> cut_after = {};  // bytes of the answer after which the connection is reset
  bool ends_quietly = false;             // it is not reset then, but ends as after a whole answer
  std::chrono::milliseconds delay{0};    // before the answer
};

class LocalServer {
 public:
  using Handler = std::function<ServedAnswer(const ServedRequest&)>;
  // How many bytes of a body are read before the connection is reset; nullopt: all. The body is
  // empty then.
  using CutRequest = std::function<std::optional<size_t>(const ServedRequest&)>;

  // Both are called from several threads at once.
  explicit LocalServer(Handler handler, CutRequest cut_request = nullptr);
  ~LocalServer();
  LocalServer(const LocalServer&) = delete;
  LocalServer& operator=(const LocalServer&) = delete;

  std::string url() const;  // "http://127.0.0.1:1234"
  int connections() const { return connections_; }

 private:
  void accept_all();
  void serve(int connection);
  bool serve_one(int connection, std::string& buffer);
  bool read_body(int connection, std::string& buffer, ServedRequest& request);
  bool pause(std::chrono::milliseconds time) const;

  const Handler handler_;
  const CutRequest cut_request_;
  int socket_ = -1;
  int port_ = 0;
  std::atomic<int> connections_ = 0;
  std::atomic<bool> stopping_ = false;
  std::mutex mutex_;  // guards the following
  std::set<int> open_;
  std::vector<std::thread> threads_;
  std::thread acceptor_;
};

enum class Fault {
  kNone,
  kUnavailable,      // 503 SlowDown
  kTooMany,          // 429
  kConflict,         // 409
  kNotImplemented,   // 501
  kErrorAfterwards,  // it is executed, then 500
  kExecutedLater,    // 500, and it is executed a moment later
  kLostAnswer,       // it is executed, then the connection is reset
  kCutRequest,       // the connection is reset within the body
  kCutAnswer,        // the connection is reset within the answer
  kStall,            // executed, and no answer for a minute
  kTruncated,        // a well-formed answer whose body lacks its end
  kDamaged,          // a bit of the body is flipped on its way to the server
  kExpired,          // 400 ExpiredToken
  kSkewed,           // 403 RequestTimeTooSkewed, with a date an hour from now
  kOtherRegion,      // 301 with another region
  kErrorInside,      // executed, then 200 with an <Error>
};

class FaultProxy {
 public:
  using Choose = std::function<Fault(const ServedRequest&)>;  // from several threads at once

  FaultProxy(std::string upstream, Choose choose);

  std::string url() const { return server_.url(); }
  int faults() const { return faults_; }

 private:
  Fault choose(const ServedRequest& request);
  ServedAnswer answer(const ServedRequest& request);
  ServedAnswer forward(const ServedRequest& request) const;
  void forward_later(const ServedRequest& request);

  const std::string upstream_;
  const Choose choose_;
  std::atomic<int> faults_ = 0;
  std::mutex mutex_;  // guards the following
  std::vector<std::jthread> later_;
  LocalServer server_;
};

// A refusal as S3 writes it.
ServedAnswer refusal(int status, const std::string& code, const std::string& more = "");

}  // namespace tilestone::s3
