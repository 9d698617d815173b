#include "tilestone/storage/s3/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/storage/s3/attempts_internal.h"
#include "tilestone/storage/s3/encode.h"

// The functions for this one hash need no more of the library, which a wheel carries.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/md5.h>

namespace tilestone::s3 {
namespace {

constexpr Action kPut = {"PutObject", "s3:PutObject"};
constexpr Action kGet = {"GetObject", "s3:GetObject"};
constexpr Action kHead = {"HeadObject", "s3:GetObject"};
constexpr Action kList = {"ListObjectsV2", "s3:ListBucket"};
constexpr Action kRemove = {"DeleteObject", "s3:DeleteObject"};
constexpr Action kRemoveMany = {"DeleteObjects", "s3:DeleteObject"};
constexpr Action kBegin = {"CreateMultipartUpload", "s3:PutObject"};
constexpr Action kUploadPart = {"UploadPart", "s3:PutObject"};
constexpr Action kComplete = {"CompleteMultipartUpload", "s3:PutObject"};
constexpr Action kAbort = {"AbortMultipartUpload", "s3:AbortMultipartUpload"};
constexpr Action kUploads = {"ListMultipartUploads", "s3:ListBucketMultipartUploads"};

constexpr const char* kCrc32Header = "x-amz-checksum-crc32";

std::string content_md5(std::string_view text) {
  std::array<std::byte, MD5_DIGEST_LENGTH> digest;
  MD5(reinterpret_cast<const unsigned char*>(text.data()), text.size(),
      reinterpret_cast<unsigned char*>(digest.data()));
  return base64(digest);
}

size_t size_of(const std::vector<ByteView>& body) {
  size_t size = 0;
  for (const ByteView part : body) size += part.size();
  return size;
}

bool same_bytes(ByteView stored, const std::vector<ByteView>& body) {
  if (stored.size() != size_of(body)) return false;
  for (const ByteView part : body) {
    if (!std::ranges::equal(stored.first(part.size()), part)) return false;
    stored = stored.subspan(part.size());
  }
  return true;
}

bool succeeded(const Answer& answer) { return answer.http.status / 100 == 2; }
std::string etag_of(const Answer& answer) { return answer.http.header("etag"); }

ObjectInfo info_of(const HttpAnswer& answer) {
  ObjectInfo info = {.etag = answer.header("etag"), .crc32 = answer.header(kCrc32Header)};
  info.size = std::strtoull(answer.header("content-length").c_str(), nullptr, 10);
  return info;
}

// What x-amz-checksum-crc32 of an object may be: the CRC-32 of its parts' checksums and their
// number, or that of its bytes. Empty: parts have no checksums.
std::vector<std::string> possible_checksums(const std::vector<Part>& parts) {
  ByteWriter sums;
  uint32_t whole = 0;
  for (const Part& part : parts) {
    if (!part.crc32) return {};
    for (int shift = 24; shift >= 0; shift -= 8)
      sums.u8(static_cast<uint8_t>(*part.crc32 >> shift));
    whole = crc32_combine(whole, *part.crc32, part.size);
  }
  return {fmt::format("{}-{}", base64_crc32(crc32(sums.bytes())), parts.size()),
          base64_crc32(whole)};
}

void add_crc32(Request& request, std::optional<uint32_t> crc32) {
  if (crc32) request.headers[kCrc32Header] = base64_crc32(*crc32);
}

}  // namespace

// Http is destroyed first: its thread uses the place.
struct Client::Live {
  Live(const Config& config, const std::string& bucket)
      : place(config, bucket),
        http({.ca_bundle = config.ca_bundle, .stall = config.stall}, config.in_progress) {}

  Place place;
  Http http;
};

Client::Client(Config config, std::string bucket)
    : config_(std::move(config)),
      bucket_(std::move(bucket)),
      live_(std::make_unique<PerProcess<Live>>(
          [this] { return std::make_unique<Live>(config_, bucket_); })) {}
Client::~Client() = default;

std::shared_ptr<Attempts> Client::start(Request request, const Deadline& deadline) {
  Live& live = live_->get();
  auto attempts = std::make_shared<Attempts>(live.place, std::move(request), deadline);
  live.http.start(attempts);
  return attempts;
}

void Client::add_condition(Request& request, const Condition& condition) const {
  if (condition.is_always()) return;
  request.accepted = {412};
  if (condition.is_absent()) {
    request.headers["if-none-match"] = "*";
  } else {
    request.headers["if-match"] = condition.tag();
    request.accepted.push_back(404);  // there is no object that could have the tag
  }
}

Pending<MaybeEtag> Client::put(const std::string& key, std::vector<ByteView> body,
                               const Condition& condition, std::optional<uint32_t> crc32,
                               const Deadline& deadline) {
  Request request = {.action = kPut, .method = "PUT", .key = key, .body = body};
  request.headers = config_.new_object;
  add_crc32(request, crc32);
  add_condition(request, condition);
  const auto finish = [this, key, body, deadline](const Answer& answer) {
    if (succeeded(answer)) return std::optional(etag_of(answer));
    return answer.repeated ? stored(key, body, deadline) : std::nullopt;
  };
  return {start(std::move(request), deadline), finish};
}

// The ETag of the object if it has these bytes.
MaybeEtag Client::stored(const std::string& key, const std::vector<ByteView>& body,
                         const Deadline& deadline) {
  const auto info = head(key, false, deadline).wait();
  if (!info || info->size != size_of(body)) return std::nullopt;
  Bytes bytes(info->size);
  if (!bytes.empty()) get(key, 0, bytes, info->etag, deadline).wait();
  return same_bytes(bytes, body) ? std::optional(info->etag) : std::nullopt;
}

Pending<std::string> Client::get(const std::string& key, uint64_t offset, MutableByteView into,
                                 const std::string& etag, const Deadline& deadline) {
  if (into.empty()) throw Error(ErrorCode::kInvalidArgument, "a read of no bytes").with_file(key);
  Request request = {.action = kGet, .method = "GET", .key = key, .into = into};
  request.headers["range"] = fmt::format("bytes={}-{}", offset, offset + into.size() - 1);
  if (!etag.empty()) request.headers["if-match"] = etag;
  // Some stores ignore the condition.
  const auto finish = [this, key, etag](const Answer& answer) {
    const std::string found = etag_of(answer);
    if (etag.empty() || found == etag) return found;
    throw Error(ErrorCode::kMismatch, fmt::format("s3://{}/{} has the ETag {}, and {} was expected",
                                                  bucket_, key, found, etag));
  };
  return {start(std::move(request), deadline), finish};
}

Pending<std::optional<WholeObject>> Client::get_whole(const std::string& key,
                                                      const Deadline& deadline) {
  Request request = {.action = kGet, .method = "GET", .key = key, .accepted = {404}};
  const auto finish = [](const Answer& answer) -> std::optional<WholeObject> {
    if (!succeeded(answer)) return std::nullopt;
    return WholeObject{to_bytes(answer.http.body), answer.http.header("etag")};
  };
  return {start(std::move(request), deadline), finish};
}

Pending<std::optional<ObjectInfo>> Client::head(const std::string& key, bool checksum,
                                                const Deadline& deadline) {
  Request request = {.action = kHead, .method = "HEAD", .key = key, .accepted = {404}};
  if (checksum) request.headers["x-amz-checksum-mode"] = "ENABLED";
  const auto finish = [](const Answer& answer) {
    return succeeded(answer) ? std::optional(info_of(answer.http)) : std::nullopt;
  };
  return {start(std::move(request), deadline), finish};
}

Pending<ListPage> Client::list(const ListRequest& list, const Deadline& deadline) {
  Request request = {.action = kList, .method = "GET", .answers_xml = true};
  request.query = {{"list-type", "2"},
                   {"encoding-type", "url"},
                   {"prefix", list.prefix},
                   {"max-keys", std::to_string(list.page)}};
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) request.query.emplace_back(name, value);
  };
  add("delimiter", list.delimiter);
  add("start-after", list.start_after);
  add("continuation-token", list.next);
  return {start(std::move(request), deadline),
          [](const Answer& answer) { return parse_list(answer.http.body); }};
}

Pending<std::vector<NotDeleted>> Client::remove(const std::vector<std::string>& keys,
                                                const Deadline& deadline) {
  if (keys.empty() || keys.size() > kMaxKeysToRemove) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} keys to remove; 1 to {} were expected",
                                                         keys.size(), kMaxKeysToRemove));
  }
  Request request = {.action = kRemoveMany, .method = "POST", .query = {{"delete", ""}}};
  request.answers_xml = true;
  request.document = delete_document(keys);
  request.headers["content-md5"] = content_md5(request.document);
  return {start(std::move(request), deadline),
          [](const Answer& answer) { return parse_deleted(answer.http.body); }};
}

Pending<bool> Client::remove_if(const std::string& key, const std::string& etag,
                                const Deadline& deadline) {
  Request request = {.action = kRemove, .method = "DELETE", .key = key, .accepted = {404, 412}};
  request.headers["if-match"] = etag;
  const auto finish = [this, key, deadline](const Answer& answer) {
    return answer.http.status != 412 || !head(key, false, deadline).wait().has_value();
  };
  return {start(std::move(request), deadline), finish};
}

Pending<std::string> Client::begin_upload(const std::string& key, bool checksums,
                                          const Deadline& deadline) {
  Request request = {.action = kBegin, .method = "POST", .key = key, .query = {{"uploads", ""}}};
  request.answers_xml = true;
  request.headers = config_.new_object;
  if (checksums) request.headers["x-amz-checksum-algorithm"] = "CRC32";
  return {start(std::move(request), deadline),
          [](const Answer& answer) { return parse_upload_id(answer.http.body); }};
}

Pending<std::string> Client::upload_part(const std::string& key, const std::string& id, int number,
                                         std::vector<ByteView> body, std::optional<uint32_t> crc32,
                                         const Deadline& deadline) {
  Request request = {.action = kUploadPart, .method = "PUT", .key = key, .body = std::move(body)};
  request.query = {{"partNumber", std::to_string(number)}, {"uploadId", id}};
  add_crc32(request, crc32);
  return {start(std::move(request), deadline), etag_of};
}

Pending<MaybeEtag> Client::complete(const std::string& key, const std::string& id,
                                    std::vector<Part> parts, const Condition& condition,
                                    const Deadline& deadline) {
  Request request = {
      .action = kComplete, .method = "POST", .key = key, .query = {{"uploadId", id}}};
  request.answers_xml = true;
  request.document = complete_document(parts);
  request.headers["content-type"] = "application/xml";
  add_condition(request, condition);
  request.accepted.push_back(404);
  const auto finish = [this, key, id, parts = std::move(parts),
                       deadline](const Answer& answer) -> MaybeEtag {
    if (succeeded(answer)) return parse_completed(answer.http.body);
    if (answer.repeated) {
      if (const auto etag = completed(key, parts, deadline)) return etag;
    }
    const Refusal refusal = parse_refusal(answer.http.body);
    if (answer.http.status == 412 || refusal.code == "NoSuchKey") return std::nullopt;
    throw refused({.action = kComplete, .key = key}, bucket_, answer.http, refusal);
  };
  return {start(std::move(request), deadline), finish};
}

// The ETag of the object if it is what these parts make: by its size, and by its checksum if the
// store has kept one.
MaybeEtag Client::completed(const std::string& key, const std::vector<Part>& parts,
                            const Deadline& deadline) {
  const std::vector<std::string> checksums = possible_checksums(parts);
  const auto info = head(key, !checksums.empty(), deadline).wait();
  uint64_t size = 0;
  for (const Part& part : parts) size += part.size;
  if (!info || info->size != size) return std::nullopt;
  const bool differs = !info->crc32.empty() && !checksums.empty() &&
                       std::ranges::find(checksums, info->crc32) == checksums.end();
  return differs ? std::nullopt : std::optional(info->etag);
}

Pending<bool> Client::abort(const std::string& key, const std::string& id,
                            const Deadline& deadline) {
  Request request = {.action = kAbort, .method = "DELETE", .key = key, .query = {{"uploadId", id}}};
  request.accepted = {404};
  return {start(std::move(request), deadline), succeeded};
}

Pending<UploadPage> Client::uploads(const std::string& prefix, const std::optional<Upload>& after,
                                    const Deadline& deadline) {
  Request request = {.action = kUploads, .method = "GET", .answers_xml = true};
  request.query = {{"uploads", ""}, {"prefix", prefix}, {"encoding-type", "url"}};
  if (after) {
    request.query.emplace_back("key-marker", after->key);
    if (!after->id.empty()) request.query.emplace_back("upload-id-marker", after->id);
  }
  return {start(std::move(request), deadline),
          [](const Answer& answer) { return parse_uploads(answer.http.body); }};
}

}  // namespace tilestone::s3
