#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "tilestone/storage/s3/encode.h"
#include "tilestone/storage/s3/transfer_internal.h"

namespace tilestone::s3 {
namespace {

constexpr long kReceiveBuffer = 512 << 10;  // bytes
constexpr long kSendBuffer = 512 << 10;
// CURLOPT_QUICK_EXIT of libcurl 7.87: who ends a request does not wait for its look-up of the name.
constexpr auto kQuickExit = static_cast<CURLoption>(CURLOPTTYPE_LONG + 322);
constexpr size_t kWorthAsking = 1 << 20;  // bytes; a server that does not know 100 costs a second

// Programs that this process starts don't inherit connections.
curl_socket_t open_socket(void*, curlsocktype, curl_sockaddr* address) {
  return ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

// libcurl repeats a request by itself if a connection from its pool turns out to be dead. Whether
// the server has executed the first one would then be unknown here. It does not ask before it
// repeats a request without a body: a POST, which does something twice then, has a fresh one.
int refuse_to_repeat(void*, curl_off_t, int) { return CURL_SEEKFUNC_FAIL; }

size_t total_size(const std::vector<ByteView>& parts) {
  size_t size = 0;
  for (const ByteView part : parts) size += part.size();
  return size;
}

}  // namespace

void begin_curl() {
  static const CURLcode begun = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (begun != CURLE_OK) throw std::bad_alloc();
}

std::string HttpAnswer::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

Transfer::Transfer(HttpSettings settings) : settings_(std::move(settings)) {
  begin_curl();
  handle_.reset(curl_easy_init());
  if (handle_ == nullptr) throw std::bad_alloc();
}

template <typename T>
void Transfer::set(CURLoption option, T value) {
  if (curl_easy_setopt(handle_.get(), option, value) == CURLE_OUT_OF_MEMORY) throw std::bad_alloc();
}

CURL* Transfer::begin(HttpRequest request, bool ask_first) {
  curl_easy_reset(handle_.get());
  request_ = std::move(request);
  answer_ = {};
  part_ = sent_ = 0;
  has_head_ = too_long_ = false;
  problem_.fill('\0');
  set(CURLOPT_URL, request_.url.c_str());
  set(CURLOPT_PATH_AS_IS, 1L);
  set_method();
  set_headers(ask_first);
  set_limits();
  set(CURLOPT_ERRORBUFFER, problem_.data());
  set(
      CURLOPT_WRITEFUNCTION, +[](char* data, size_t size, size_t count, void* self) {
        return static_cast<Transfer*>(self)->receive(as_bytes({data, size * count}));
      });
  set(CURLOPT_WRITEDATA, this);
  set(
      CURLOPT_HEADERFUNCTION, +[](char* data, size_t size, size_t count, void* self) {
        static_cast<Transfer*>(self)->take_header({data, size * count});
        return size * count;
      });
  set(CURLOPT_HEADERDATA, this);
  set(CURLOPT_OPENSOCKETFUNCTION, open_socket);
  return handle_.get();
}

void Transfer::set_method() {
  if (request_.method == "HEAD") return set(CURLOPT_NOBODY, 1L);
  set(CURLOPT_CUSTOMREQUEST, request_.method.c_str());
  if (request_.method != "PUT" && request_.method != "POST") return;
  const bool has_body = total_size(request_.body) > 0;
  if (request_.method == "POST" && !has_body) set(CURLOPT_FRESH_CONNECT, 1L);
  set(CURLOPT_UPLOAD, 1L);
  set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(total_size(request_.body)));
  set(
      CURLOPT_READFUNCTION, +[](char* data, size_t size, size_t count, void* self) {
        return static_cast<Transfer*>(self)->send(
            {reinterpret_cast<std::byte*>(data), size * count});
      });
  set(CURLOPT_READDATA, this);
  set(CURLOPT_SEEKFUNCTION, refuse_to_repeat);
}

void Transfer::set_headers(bool ask_first) {
  curl_slist* list = nullptr;
  const auto add = [&](const std::string& line) {
    curl_slist* const longer = curl_slist_append(list, line.c_str());
    if (longer == nullptr) throw std::bad_alloc();
    list = longer;
  };
  for (const auto& [name, value] : request_.headers) {
    add(value.empty() ? name + ";" : name + ": " + value);  // libcurl's form of an empty value
  }
  if (!ask_first || total_size(request_.body) < kWorthAsking) add("Expect:");
  list_.reset(list);
  set(CURLOPT_HTTPHEADER, list);
}

void Transfer::set_limits() {
  set(CURLOPT_NOSIGNAL, 1L);
  set(kQuickExit, 1L);
  set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  set(CURLOPT_BUFFERSIZE, kReceiveBuffer);
  set(CURLOPT_UPLOAD_BUFFERSIZE, kSendBuffer);
  set(CURLOPT_TCP_KEEPALIVE, 1L);
  set(CURLOPT_LOW_SPEED_LIMIT, 1L);  // bytes per second
  set(CURLOPT_LOW_SPEED_TIME, static_cast<long>(settings_.stall.count()));
  set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(settings_.connect.count()));
  set(CURLOPT_TIMEOUT_MS, static_cast<long>(settings_.whole.count()));
  if (!settings_.ca_bundle.empty()) set(CURLOPT_CAINFO, settings_.ca_bundle.c_str());
  set(CURLOPT_NOPROGRESS, settings_.stop.stop_possible() ? 0L : 1L);
  set(
      CURLOPT_XFERINFOFUNCTION, +[](void* self, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
        return static_cast<Transfer*>(self)->settings_.stop.stop_requested() ? 1 : 0;
      });
  set(CURLOPT_XFERINFODATA, this);
  // Both are always set, so that libcurl does not read the environment on this thread, which the
  // program may change on another one.
  set(CURLOPT_PROXY, settings_.proxy.c_str());
  set(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);  // they are no head of an answer
  set(CURLOPT_NOPROXY, settings_.no_proxy.c_str());
}

HttpAnswer Transfer::end(CURLcode code) {
  answer_.failure = failure_of(code);
  if (answer_.failure != Failure::kNone) answer_.problem = problem_of(code);
  request_ = {};
  return std::exchange(answer_, {});
}

Failure Transfer::failure_of(CURLcode code) const {
  if (too_long_) return Failure::kPermanent;
  long sent = 0;
  switch (code) {
    case CURLE_OK:
      // For libcurl the end of a connection ends the head too.
      return has_head_ ? Failure::kNone : Failure::kLost;
    case CURLE_OPERATION_TIMEDOUT:
      curl_easy_getinfo(handle_.get(), CURLINFO_REQUEST_SIZE, &sent);
      return sent == 0 ? Failure::kUnreachable : Failure::kLost;
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_SSL_CONNECT_ERROR:
      return Failure::kUnreachable;
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_BAD_FUNCTION_ARGUMENT:
      return Failure::kPermanent;
    default:
      return Failure::kLost;
  }
}

std::string Transfer::problem_of(CURLcode code) const {
  if (too_long_) return "the answer is longer than what was asked for";
  if (code == CURLE_OK) return "the connection ended within the head of the answer";
  std::string text = problem_.data();
  // A proxy's URL, which may contain a password.
  if (text.starts_with("Unsupported proxy"))
    text.resize(std::min(text.find(" for '"), text.size()));
  if (text.empty() || text.find('@') != std::string::npos) text = curl_easy_strerror(code);
  if (code != CURLE_PEER_FAILED_VERIFICATION && code != CURLE_SSL_CACERT_BADFILE) return text;
  return fmt::format(
      "{} (the known authorities are {}; set AWS_CA_BUNDLE to a file that has the server's)", text,
      settings_.ca_bundle.empty() ? "none" : "in " + settings_.ca_bundle);
}

size_t Transfer::send(MutableByteView out) {
  size_t size = 0;
  while (size < out.size() && part_ < request_.body.size()) {
    const ByteView rest = request_.body[part_].subspan(sent_);
    const size_t count = std::min(rest.size(), out.size() - size);
    if (count > 0) std::memcpy(out.data() + size, rest.data(), count);
    size += count;
    sent_ += count;
    if (count < rest.size()) break;
    ++part_;
    sent_ = 0;
  }
  return size;
}

size_t Transfer::receive(ByteView bytes) {
  const bool direct = answer_.status / 100 == 2 && !request_.into.empty();
  const size_t room =
      direct ? request_.into.size() - answer_.received : kMaxAnswer - answer_.body.size();
  too_long_ = bytes.size() > room;
  if (too_long_) return 0;  // libcurl ends the transfer
  if (direct) {
    std::memcpy(request_.into.data() + answer_.received, bytes.data(), bytes.size());
    answer_.received += bytes.size();
  } else {
    answer_.body += as_text(bytes);
  }
  return bytes.size();
}

void Transfer::take_header(std::string_view line) {
  if (line.starts_with("HTTP/")) {  // the first, or the one after "100 Continue"
    const size_t space = std::min(line.find(' '), line.size());
    answer_.headers.clear();
    has_head_ = false;
    answer_.status = std::atoi(std::string(line.substr(space)).c_str());
    return;
  }
  if (trimmed(line).empty()) has_head_ = answer_.status >= 200;
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return;
  answer_.headers[lower_case(line.substr(0, colon))] = trimmed(line.substr(colon + 1));
}

HttpAnswer fetch(HttpRequest request, const HttpSettings& settings) {
  Transfer transfer(settings);
  CURL* const handle = transfer.begin(std::move(request), false);
  return transfer.end(curl_easy_perform(handle));
}

}  // namespace tilestone::s3
