// One easy handle of libcurl, used for one request after another.
#pragma once

#include <curl/curl.h>

#include <array>
#include <memory>

#include "tilestone/storage/s3/http.h"

namespace tilestone::s3 {

class Transfer {
 public:
  explicit Transfer(HttpSettings settings);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Sets the handle up. ask_first: a large body waits for "100 Continue", so that an answer that
  // refuses it arrives before it is sent.
  CURL* begin(HttpRequest request, bool ask_first);
  HttpAnswer end(CURLcode code);

 private:
  template <typename T>
  void set(CURLoption option, T value);
  void set_method();
  void set_headers(bool ask_first);
  void set_limits();
  Failure failure_of(CURLcode code) const;
  std::string problem_of(CURLcode code) const;

  size_t send(MutableByteView out);
  size_t receive(ByteView bytes);
  void take_header(std::string_view line);

  const HttpSettings settings_;
  std::unique_ptr<CURL, void (*)(CURL*)> handle_{nullptr, curl_easy_cleanup};
  std::unique_ptr<curl_slist, void (*)(curl_slist*)> list_{nullptr, curl_slist_free_all};
  std::array<char, CURL_ERROR_SIZE> problem_ = {};
  HttpRequest request_;
  HttpAnswer answer_;
  size_t part_ = 0, sent_ = 0;  // the next byte to send: of request_.body[part_]
  bool has_head_ = false;       // whole
  bool too_long_ = false;
};

// Before the first use of libcurl. Thread-safe.
void begin_curl();

}  // namespace tilestone::s3
