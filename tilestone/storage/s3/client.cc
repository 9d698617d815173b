#include "tilestone/storage/s3/client.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/sha256.h"
#include "tilestone/base/url_text.h"
#include "tilestone/storage/s3/attempts_internal.h"
#include "tilestone/storage/s3/encode.h"

// The functions for this one hash need no more of the library, which a wheel carries.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/md5.h>

namespace tilestone::s3 {
namespace {

constexpr Action kPut = {"PutObject", "s3:PutObject"};
constexpr Action kCopy = {"CopyObject", "s3:GetObject and s3:PutObject"};
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

std::array<std::byte, MD5_DIGEST_LENGTH> md5(ByteView bytes) {
  std::array<std::byte, MD5_DIGEST_LENGTH> digest;
  MD5(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
      reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
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

// Whether a request could be about another key than this one: XML has no control characters.
void check_key(const std::string& key) {
  if (std::ranges::none_of(key, [](char c) { return static_cast<unsigned char>(c) < ' '; })) return;
  throw Error(ErrorCode::kInvalidArgument, "a key has a control character").with_file(key);
}

Request range_of(const std::string& key, uint64_t offset, MutableByteView into) {
  Request request = {.action = kGet, .method = "GET", .key = key, .into = into};
  request.headers["range"] = fmt::format("bytes={}-{}", offset, offset + into.size() - 1);
  return request;
}

uint64_t number_of(const std::string& text) { return std::strtoull(text.c_str(), nullptr, 10); }

ObjectInfo info_of(const HttpAnswer& answer) {
  ObjectInfo info = {.etag = answer.header("etag"), .crc32 = answer.header(kCrc32Header)};
  info.size = number_of(answer.header("content-length"));
  constexpr const char* kForm = "%a, %d %b %Y %H:%M:%S";
  info.modified = parse_utc(answer.header("last-modified"), kForm);
  const auto now = parse_utc(answer.header("date"), kForm);
  if (now && info.modified) info.age = std::chrono::duration<double>(*now - *info.modified);
  return info;
}

// Of the answer to a range. 416: the object is empty. "bytes 0-99/1234" says the whole size.
Beginning beginning_of(const HttpAnswer& answer) {
  Beginning beginning = {.etag = answer.header("etag")};
  if (answer.status == 416) return beginning;
  beginning.bytes = to_bytes(answer.body);
  const std::string range = answer.header("content-range");
  beginning.size =
      range.empty() ? answer.body.size() : number_of(range.substr(range.find('/') + 1));
  return beginning;
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

// The ETag of an object of these parts, if theirs are MD5: the MD5 of these and their number.
std::string possible_etag(const std::vector<Part>& parts) {
  std::string sums;
  for (const Part& part : parts) {
    std::string escaped;
    const std::string digits = part.etag.substr(part.etag.starts_with('"'), 32);
    for (size_t at = 0; at < digits.size(); at += 2) escaped += "%" + digits.substr(at, 2);
    sums += url_decode(escaped);
  }
  if (sums.size() != parts.size() * MD5_DIGEST_LENGTH) return "none";
  return fmt::format("\"{}-{}\"", hex(md5(as_bytes(sums))), parts.size());
}

void expect_etag(const std::string& etag) {
  if (etag.empty()) throw Error(ErrorCode::kInvalidArgument, "a condition with an empty ETag");
}

void add_condition(Request& request, const Condition& condition) {
  if (condition.is_always()) return;
  request.accepted = {412};
  if (condition.is_absent()) {
    request.headers["if-none-match"] = "*";
  } else {
    expect_etag(condition.tag());
    request.headers["if-match"] = condition.tag();
    request.accepted.push_back(404);  // there is no object that could have the tag
  }
}

void add_crc32(Request& request, std::optional<uint32_t> crc32) {
  if (crc32) request.headers[kCrc32Header] = base64_crc32(*crc32);
}

}  // namespace

// Http is destroyed first: its thread uses the place.
struct Client::Live {
  Live(const Config& config, const std::string& bucket)
      : place(config, bucket),
        http(with_proxy(
                 {.ca_bundle = config.ca_bundle, .stall = config.stall, .connect = config.connect},
                 config.environment, config.endpoint),
             config.in_progress) {}

  Place place;
  Http http;
};

Client::Client(Config config, std::string bucket)
    : config_(std::move(config)),
      bucket_(std::move(bucket)),
      live_(std::make_unique<PerProcess<Live>>(
          [this] { return std::make_unique<Live>(config_, bucket_); })) {}
Client::~Client() = default;

std::shared_ptr<Attempts> Client::start(Request request, const Deadline& deadline, AtEnd at_end) {
  check_key(request.key);
  Live& live = live_->get();
  auto attempts = std::make_shared<Attempts>(live.place, live.http, std::move(request), deadline,
                                             std::move(at_end));
  live.http.start(attempts);
  return attempts;
}

Request Client::put_request(const std::string& key, const std::vector<ByteView>& body,
                            const Condition& condition) const {
  Request request = {.action = kPut, .method = "PUT", .key = key, .body = body};
  request.headers = config_.new_object;
  add_condition(request, condition);
  return request;
}

Pending<MaybeEtag> Client::put(const std::string& key, std::vector<ByteView> body,
                               const Condition& condition, std::optional<uint32_t> crc32,
                               const Deadline& deadline) {
  Request request = put_request(key, body, condition);
  add_crc32(request, crc32);
  const auto finish = [this, key, body, deadline](const Answer& answer) {
    return succeeded(answer) ? std::optional(etag_of(answer)) : stored(key, body, deadline);
  };
  return {start(std::move(request), deadline), finish};
}

Pending<bool> Client::refuses(const std::string& key, std::vector<ByteView> body,
                              const Condition& condition, const Deadline& deadline) {
  return {start(put_request(key, body, condition), deadline),
          [](const Answer& answer) { return !succeeded(answer); }};
}

// The ETag of the object if it has these bytes.
MaybeEtag Client::stored(const std::string& key, const std::vector<ByteView>& body,
                         const Deadline& deadline) {
  Bytes bytes(size_of(body));
  if (bytes.empty()) {
    const auto info = head(key, false, deadline).wait();
    return info && info->size == 0 ? std::optional(info->etag) : std::nullopt;
  }
  Request request = range_of(key, 0, bytes);
  request.accepted = {404, 416};  // 416: it is empty
  const HttpAnswer answer = start(std::move(request), deadline)->wait().http;
  const std::string range = answer.header("content-range");
  const bool is_whole = range.empty() || range.ends_with(fmt::format("/{}", bytes.size()));
  const bool is_same = answer.status / 100 == 2 && answer.received == bytes.size() && is_whole &&
                       same_bytes(bytes, body);
  return is_same ? std::optional(answer.header("etag")) : std::nullopt;
}

Pending<std::string> Client::get(const std::string& key, uint64_t offset, MutableByteView into,
                                 const std::string& etag, const Deadline& deadline, AtEnd at_end) {
  if (into.empty()) throw Error(ErrorCode::kInvalidArgument, "a read of no bytes").with_file(key);
  Request request = range_of(key, offset, into);
  if (!etag.empty()) request.headers["if-match"] = etag;
  // Some stores ignore the condition.
  const auto finish = [this, key, offset, into, etag](const Answer& answer) {
    const std::string found = etag_of(answer);
    if (!etag.empty() && found != etag) {
      throw Error(ErrorCode::kMismatch,
                  fmt::format("s3://{}/{} has the ETag {}, and {} was expected", bucket_, key,
                              found, etag));
    }
    if (answer.http.received == into.size()) return found;
    throw Error(ErrorCode::kIo,
                fmt::format("s3://{}/{} is too short: {} bytes were expected at {}, {} found",
                            bucket_, key, into.size(), offset, answer.http.received));
  };
  return {start(std::move(request), deadline, std::move(at_end)), finish};
}

Pending<std::optional<Beginning>> Client::get_beginning(const std::string& key,
                                                        const Deadline& deadline, size_t most) {
  Request request = {.action = kGet, .method = "GET", .key = key, .accepted = {404, 416}};
  request.headers["range"] = fmt::format("bytes=0-{}", most - 1);
  const auto finish = [](const Answer& answer) -> std::optional<Beginning> {
    if (answer.http.status == 404) return std::nullopt;
    return beginning_of(answer.http);
  };
  return {start(std::move(request), deadline), finish};
}

Pending<std::optional<ObjectInfo>> Client::head(const std::string& key, bool checksum,
                                                const Deadline& deadline) {
  Request request = {.action = kHead, .method = "HEAD", .key = key, .accepted = {404}};
  if (checksum) request.headers["x-amz-checksum-mode"] = "ENABLED";
  const auto finish = [this, key, deadline](const Answer& answer) -> std::optional<ObjectInfo> {
    if (succeeded(answer)) return info_of(answer.http);
    // Without the id of a request it may be a gateway's, whose answer to GET shows that.
    if (answer.http.header("x-amz-request-id").empty()) expect_none(key, deadline);
    return std::nullopt;
  };
  return {start(std::move(request), deadline), finish};
}

void Client::expect_none(const std::string& key, const Deadline& deadline) {
  Bytes one(1);
  Request request = range_of(key, 0, one);
  request.accepted = {404, 416};
  if (start(std::move(request), deadline)->wait().http.status == 404) return;
  throw Error(ErrorCode::kIo,
              fmt::format("HEAD s3://{}/{} says 404, but there is such an object", bucket_, key));
}

Pending<MaybeEtag> Client::copy(const std::string& from_bucket, const std::string& from,
                                const std::string& key, const Deadline& deadline) {
  Request request = {.action = kCopy, .method = "PUT", .key = key, .accepted = {404}};
  request.answers_xml = true;
  request.headers = config_.new_object;
  request.headers["x-amz-copy-source"] = "/" + from_bucket + "/" + url_encode(from, "/");
  const auto finish = [](const Answer& answer) {
    return succeeded(answer) ? parse_made(answer.http.body, "CopyObjectResult") : std::nullopt;
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
  std::ranges::for_each(keys, check_key);
  Request request = {.action = kRemoveMany, .method = "POST", .query = {{"delete", ""}}};
  request.answers_xml = true;
  request.document = delete_document(keys);
  request.headers["content-md5"] = base64(md5(as_bytes(request.document)));
  return {start(std::move(request), deadline),
          [](const Answer& answer) { return parse_deleted(answer.http.body); }};
}

Pending<bool> Client::remove_if(const std::string& key, const std::string& etag,
                                const Deadline& deadline) {
  expect_etag(etag);
  Request request = {.action = kHead, .method = "HEAD", .key = key, .accepted = {404}};
  const auto finish = [this, key, etag, deadline](const Answer& answer) {
    if (!succeeded(answer)) return true;
    return etag_of(answer) == etag && remove_own(key, etag, deadline).wait();
  };
  return {start(std::move(request), deadline), finish};
}

Pending<bool> Client::remove_own(const std::string& key, const std::string& etag,
                                 const Deadline& deadline) {
  expect_etag(etag);
  Request request = {.action = kRemove, .method = "DELETE", .key = key, .accepted = {404, 412}};
  request.headers["if-match"] = etag;
  const auto finish = [this, key, deadline](const Answer& answer) {
    return answer.http.status != 412 || !head(key, false, deadline).wait();
  };
  return {start(std::move(request), deadline), finish};
}

Pending<std::string> Client::begin_upload(const std::string& key, bool checksums,
                                          const Deadline& deadline) {
  Request request = {.action = kBegin, .method = "POST", .key = key, .query = {{"uploads", ""}}};
  request.answers_xml = true;
  request.headers = config_.new_object;
  if (checksums) request.headers["x-amz-checksum-algorithm"] = "CRC32";
  const auto finish = [this, key, deadline](const Answer& answer) {
    std::string id = parse_upload_id(answer.http.body);
    if (answer.repeated) abort_others(key, id, deadline);
    return id;
  };
  return {start(std::move(request), deadline), finish};
}

void Client::abort_others(const std::string& key, const std::string& id, const Deadline& deadline) {
  for (const Upload& each : uploads(key, std::nullopt, deadline).wait().uploads) {
    if (each.key == key && each.id != id) abort(key, each.id, deadline).wait();
  }
}

Pending<std::string> Client::upload_part(const std::string& key, const std::string& id, int number,
                                         std::vector<ByteView> body, std::optional<uint32_t> crc32,
                                         const Deadline& deadline, AtEnd at_end) {
  Request request = {.action = kUploadPart, .method = "PUT", .key = key, .body = std::move(body)};
  request.query = {{"partNumber", std::to_string(number)}, {"uploadId", id}};
  add_crc32(request, crc32);
  return {start(std::move(request), deadline, std::move(at_end)), etag_of};
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
  const auto finish = [this, key, parts = std::move(parts),
                       deadline](const Answer& answer) -> MaybeEtag {
    if (succeeded(answer)) return parse_made(answer.http.body, "CompleteMultipartUploadResult");
    if (const auto etag = completed(key, parts, deadline)) return etag;
    const Refusal refusal = parse_refusal(answer.http.body);
    if (answer.http.status == 412 || refusal.code == "NoSuchKey") return std::nullopt;
    throw refused({.action = kComplete, .key = key}, bucket_, answer.http, refusal);
  };
  return {start(std::move(request), deadline), finish};
}

// The ETag of the object if it is what these parts make: by its size, and by its checksum or, if
// the store has kept none, its ETag.
MaybeEtag Client::completed(const std::string& key, const std::vector<Part>& parts,
                            const Deadline& deadline) {
  const std::vector<std::string> checksums = possible_checksums(parts);
  const auto info = head(key, !checksums.empty(), deadline).wait();
  uint64_t size = 0;
  for (const Part& part : parts) size += part.size;
  if (!info || info->size != size) return std::nullopt;
  const bool is_same = std::ranges::find(checksums, info->crc32) != checksums.end() ||
                       info->etag == possible_etag(parts);
  return is_same ? std::optional(info->etag) : std::nullopt;
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
  return {start(std::move(request), deadline), [after](const Answer& answer) {
            UploadPage page = parse_uploads(answer.http.body);
            if (page.next && page.next == after) {
              throw Error(ErrorCode::kCorrupt, "a page of a list of uploads follows itself");
            }
            return page;
          }};
}

}  // namespace tilestone::s3
