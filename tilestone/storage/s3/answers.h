// S3's XML, read and written: pure functions. A document that is not what it should be is an
// Error(kCorrupt), because it may have been cut.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tilestone::s3 {

// <Error>: why a request failed. From STS too, whose document has it further inside.
struct Refusal {
  std::string code;  // "NoSuchKey"; "": the body is no such document
  std::string message;
  std::string request_id;
  std::string region;  // where the bucket is, if the refusal says so
};
Refusal parse_refusal(std::string_view xml);
// Whether another attempt may not get this one.
bool is_passing_code(std::string_view code);

// Whether it is well-formed: an answer may have been cut.
bool is_document(std::string_view xml);

struct Listed {
  std::string key;
  uint64_t size = 0;
  std::string etag;
  std::optional<std::chrono::system_clock::time_point> modified = {};

  bool operator==(const Listed&) const = default;
};
struct ListPage {
  std::vector<Listed> objects;
  std::vector<std::string> prefixes;  // common prefixes, if a delimiter was given
  std::string next;                   // what continues the list; "": this is the last page
};
ListPage parse_list(std::string_view xml);

struct Upload {
  std::string key;
  std::string id;

  bool operator==(const Upload&) const = default;
};
struct UploadPage {
  std::vector<Upload> uploads;
  std::optional<Upload> next;  // key and id that continue the list
};
UploadPage parse_uploads(std::string_view xml);

std::string parse_upload_id(std::string_view xml);
// The ETag in a document of this name, of an object that was made; "": it has none. It may be a
// Refusal: nullopt.
std::optional<std::string> parse_made(std::string_view xml, std::string_view name);

struct NotDeleted {
  std::string key;
  std::string code;
  std::string message;
};
std::vector<NotDeleted> parse_deleted(std::string_view xml);

struct Part {
  int number = 0;  // from 1
  std::string etag;
  std::optional<uint32_t> crc32 = {};
  uint64_t size = 0;
};
std::string complete_document(const std::vector<Part>& parts);
std::string delete_document(const std::vector<std::string>& keys);

struct WebIdentityAnswer {
  std::string id, secret, token, expiration;
};
WebIdentityAnswer parse_web_identity(std::string_view xml);

}  // namespace tilestone::s3
