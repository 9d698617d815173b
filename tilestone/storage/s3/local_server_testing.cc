#include "tilestone/storage/s3/local_server_testing.h"

#include <arpa/inet.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace {

bool receive_more(int connection, std::string& buffer) {
  char block[65536];
  const ssize_t size = ::recv(connection, block, sizeof block, 0);
  if (size > 0) buffer.append(block, static_cast<size_t>(size));
  return size > 0;
}

bool send_all(int connection, std::string_view text) {
  while (!text.empty()) {
    const ssize_t size = ::send(connection, text.data(), text.size(), MSG_NOSIGNAL);
    if (size <= 0) return false;
    text.remove_prefix(static_cast<size_t>(size));
  }
  return true;
}

// Ends a connection with RST.
void reset(int connection) {
  const linger now = {1, 0};
  ::setsockopt(connection, SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

ServedRequest parse_head(std::string_view head) {
  ServedRequest request;
  const size_t first = head.find(' '), second = head.find(' ', first + 1);
  request.method = head.substr(0, first);
  request.target = head.substr(first + 1, second - first - 1);
  for (size_t line = head.find("\r\n"); line + 2 < head.size();) {
    const size_t end = std::min(head.find("\r\n", line + 2), head.size());
    const std::string_view text = head.substr(line + 2, end - line - 2);
    const size_t colon = std::min(text.find(':'), text.size());
    if (colon < text.size()) {
      request.headers[lower_case(text.substr(0, colon))] = trimmed(text.substr(colon + 1));
    }
    line = end;
  }
  return request;
}

std::string encoded_answer(const ServedRequest& request, const ServedAnswer& answer) {
  std::string text = fmt::format("HTTP/1.1 {} Answer\r\n", answer.status);
  Headers headers = {{"content-length", std::to_string(answer.body.size())}, {"etag", "\"any\""}};
  for (const auto& [name, value] : answer.headers) headers[name] = value;
  for (const auto& [name, value] : headers) {
    if (!value.empty()) text += fmt::format("{}: {}\r\n", name, value);
  }
  text += "\r\n";
  return request.method == "HEAD" ? text : text + answer.body;
}

}  // namespace

LocalServer::LocalServer(Handler handler, CutRequest cut_request)
    : handler_(std::move(handler)), cut_request_(std::move(cut_request)) {
  socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(socket_, any, size) != 0 || ::listen(socket_, 128) != 0 ||
      ::getsockname(socket_, any, &size) != 0) {
    throw Error(ErrorCode::kIo, "no local server").with_errno(errno);
  }
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { accept_all(); });
}

LocalServer::~LocalServer() {
  stopping_ = true;
  ::shutdown(socket_, SHUT_RDWR);
  acceptor_.join();
  {
    const std::lock_guard lock(mutex_);
    for (const int connection : open_) ::shutdown(connection, SHUT_RDWR);
  }
  for (std::thread& thread : threads_) thread.join();
  ::close(socket_);
}

std::string LocalServer::url() const { return fmt::format("http://127.0.0.1:{}", port_); }

void LocalServer::accept_all() {
  while (true) {
    const int connection = ::accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) return;
    ++connections_;
    const std::lock_guard lock(mutex_);
    open_.insert(connection);
    threads_.emplace_back([this, connection] { serve(connection); });
  }
}

void LocalServer::serve(int connection) {
  std::string buffer;
  while (serve_one(connection, buffer)) {
  }
  const std::lock_guard lock(mutex_);
  open_.erase(connection);
  ::close(connection);
}

bool LocalServer::serve_one(int connection, std::string& buffer) {
  size_t end;
  while ((end = buffer.find("\r\n\r\n")) == std::string::npos) {
    if (!receive_more(connection, buffer)) return false;
  }
  ServedRequest request = parse_head(std::string_view(buffer).substr(0, end));
  buffer.erase(0, end + 4);
  if (!read_body(connection, buffer, request)) return false;
  const ServedAnswer answer = handler_(request);
  if (!pause(answer.delay)) return false;
  const std::string text = encoded_answer(request, answer);
  if (!answer.cut_after) return send_all(connection, text);
  send_all(connection, std::string_view(text).substr(0, *answer.cut_after));
  if (answer.ends_quietly) return false;
  pause(std::chrono::milliseconds(5));  // so that what was sent arrives before the reset
  reset(connection);
  return false;
}

bool LocalServer::read_body(int connection, std::string& buffer, ServedRequest& request) {
  const size_t size = std::strtoull(request.headers["content-length"].c_str(), nullptr, 10);
  const std::optional<size_t> cut = cut_request_ ? cut_request_(request) : std::nullopt;
  if (request.headers.contains("expect") &&
      !send_all(connection, "HTTP/1.1 100 Continue\r\n\r\n")) {
    return false;
  }
  while (buffer.size() < std::min(size, cut.value_or(size))) {
    if (!receive_more(connection, buffer)) return false;
  }
  if (cut) {
    reset(connection);
    return false;
  }
  request.body = buffer.substr(0, size);
  buffer.erase(0, size);
  return true;
}

bool LocalServer::pause(std::chrono::milliseconds time) const {
  const auto end = std::chrono::steady_clock::now() + time;
  while (!stopping_ && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::min(time, std::chrono::milliseconds(10)));
  }
  return !stopping_;
}

ServedAnswer refusal(int status, const std::string& code, const std::string& more) {
  return {.status = status,
          .headers = {{"content-type", "application/xml"}},
          .body = fmt::format("<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{}</Code>"
                              "<Message>as the test wants</Message>{}"
                              "<RequestId>REQ1</RequestId></Error>",
                              code, more)};
}

FaultProxy::FaultProxy(std::string upstream, Choose choose)
    : upstream_(std::move(upstream)),
      choose_(std::move(choose)),
      server_([this](const ServedRequest& request) { return answer(request); },
              [this](const ServedRequest& request) -> std::optional<size_t> {
                const Fault fault = this->choose(request);
                if (fault == Fault::kCutRequest) return request.headers.size() * 97;
                return std::nullopt;
              }) {}

namespace {

// The choice for the request that this thread serves, made when its head had arrived.
thread_local Fault chosen_fault = Fault::kNone;

}  // namespace

Fault FaultProxy::choose(const ServedRequest& request) {
  chosen_fault = choose_(request);
  if (chosen_fault != Fault::kNone) ++faults_;
  return chosen_fault;
}

ServedAnswer FaultProxy::forward(const ServedRequest& request) const {
  Headers headers = request.headers;
  for (const char* const name : {"content-length", "expect", "connection", "accept"}) {
    headers.erase(name);
  }
  const HttpAnswer found = fetch({.method = request.method,
                                  .url = upstream_ + request.target,
                                  .headers = headers,
                                  .body = {as_bytes(request.body)}},
                                 {});
  ServedAnswer out = {found.status, found.headers, found.body};
  if (found.failure != Failure::kNone) out = refusal(502, "BadGateway");
  for (const char* const name : {"transfer-encoding", "connection"}) out.headers.erase(name);
  if (request.method != "HEAD") out.headers.erase("content-length");
  return out;
}

void FaultProxy::forward_later(const ServedRequest& request) {
  const std::lock_guard lock(mutex_);
  later_.emplace_back([this, request] {
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    forward(request);
  });
}

ServedAnswer FaultProxy::answer(const ServedRequest& request) {
  ServedAnswer out;
  switch (chosen_fault) {
    case Fault::kUnavailable:
      return refusal(503, "SlowDown");
    case Fault::kTooMany:
      return refusal(429, "TooManyRequests");
    case Fault::kConflict:
      return refusal(409, "OperationAborted");
    case Fault::kNotImplemented:
      return refusal(501, "NotImplemented");
    case Fault::kErrorAfterwards:
      forward(request);
      return refusal(500, "InternalError");
    case Fault::kExecutedLater:
      forward_later(request);
      return refusal(500, "InternalError");
    case Fault::kLostAnswer:
      forward(request);
      return {.cut_after = 0};
    case Fault::kCutAnswer:
      out = forward(request);
      out.cut_after = encoded_answer(request, out).size() / 2;
      return out;
    case Fault::kStall:
      out = forward(request);
      out.delay = std::chrono::milliseconds(60'000);
      return out;
    case Fault::kTruncated:
      out = forward(request);
      out.body.resize(out.body.size() / 2);
      return out;
    case Fault::kDamaged: {
      ServedRequest damaged = request;
      if (!damaged.body.empty()) damaged.body[damaged.body.size() / 2] ^= 4;
      return forward(damaged);
    }
    case Fault::kExpired:
      return refusal(400, "ExpiredToken");
    case Fault::kSkewed:
      out = refusal(403, "RequestTimeTooSkewed");
      out.headers["date"] =
          fmt::format("{:%a, %d %b %Y %H:%M:%S GMT}", fmt::gmtime(std::time(nullptr) + 3600));
      return out;
    case Fault::kOtherRegion:
      out = refusal(301, "PermanentRedirect");
      out.headers["x-amz-bucket-region"] = "eu-north-1";
      return out;
    case Fault::kErrorInside:
      forward(request);
      out = refusal(200, "InternalError");
      return out;
    case Fault::kNone:
    case Fault::kCutRequest:
      break;
  }
  return forward(request);
}

}  // namespace tilestone::s3
