#include "tilestone/storage/s3/answers.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <pugixml.hpp>
#include <sstream>

#include "tilestone/base/error.h"
#include "tilestone/base/url_text.h"
#include "tilestone/storage/s3/encode.h"

namespace tilestone::s3 {
namespace {

constexpr size_t kMaxMessage = 500;  // bytes

// Of servers: names may have a prefix of a namespace.
std::string_view local_name(const pugi::xml_node& node) {
  const std::string_view name = node.name();
  return name.substr(name.find(':') + 1);  // npos + 1 is 0
}

pugi::xml_node child(const pugi::xml_node& node, std::string_view name) {
  return node.find_child([&](const pugi::xml_node& each) { return local_name(each) == name; });
}

std::string text(const pugi::xml_node& node, std::string_view name) {
  return child(node, name).text().get();
}

// For a message: servers may write as much as they like.
std::string short_text(const pugi::xml_node& node, std::string_view name) {
  std::string found = text(node, name);
  if (found.size() <= kMaxMessage) return found;
  found.resize(kMaxMessage);
  while (!found.empty() && static_cast<signed char>(found.back()) < 0) found.pop_back();
  return found;
}

bool load(pugi::xml_document& document, std::string_view xml) {
  // Spaces at the ends of a key are a part of it.
  return bool(document.load_buffer(xml.data(), xml.size(),
                                   pugi::parse_default | pugi::parse_ws_pcdata_single));
}

// The root of a whole document with this name.
pugi::xml_node root(pugi::xml_document& document, std::string_view xml, std::string_view name) {
  const pugi::xml_node found = load(document, xml) ? child(document, name) : pugi::xml_node();
  if (!found) {
    throw Error(ErrorCode::kCorrupt,
                fmt::format("the store's answer is not a whole {} document", name));
  }
  return found;
}

// Of a list that was asked for with encoding-type=url. Not every server follows.
bool is_encoded(const pugi::xml_node& list) { return text(list, "EncodingType") == "url"; }

std::string name_text(const pugi::xml_node& node, std::string_view name, bool encoded) {
  const std::string found = text(node, name);
  return encoded ? url_decode(found) : found;
}

uint64_t parse_size(const std::string& digits) {
  const bool valid = !digits.empty() && digits.size() < 20 &&
                     digits.find_first_not_of("0123456789") == std::string::npos;
  if (!valid) throw Error(ErrorCode::kCorrupt, "a listed object has no size");
  return std::stoull(digits);
}

// Some stores leave out the quotes in lists.
std::string quoted_etag(const std::string& etag) {
  return etag.empty() || etag.front() == '"' ? etag : '"' + etag + '"';
}

template <typename Take>
void for_each(const pugi::xml_node& parent, std::string_view name, const Take& take) {
  for (const pugi::xml_node& each : parent.children()) {
    if (local_name(each) == name) take(each);
  }
}

[[noreturn]] void throw_no_next() {
  throw Error(ErrorCode::kCorrupt, "a page of a list does not say what follows");
}

std::string written(const pugi::xml_document& document) {
  std::ostringstream out;
  document.save(out, "", pugi::format_raw | pugi::format_no_declaration);
  return out.str();
}

void add(pugi::xml_node parent, const char* name, const std::string& value) {
  parent.append_child(name).text().set(value.c_str());
}

}  // namespace

Refusal parse_refusal(std::string_view xml) {
  pugi::xml_document document;
  if (xml.find('<') == std::string_view::npos || !load(document, xml)) return {};
  pugi::xml_node error = child(document, "Error");
  std::string id = text(error, "RequestId");
  if (!error) {  // of STS
    const pugi::xml_node response = child(document, "ErrorResponse");
    error = child(response, "Error");
    id = text(response, "RequestId");
  }
  return {short_text(error, "Code"), short_text(error, "Message"), id, text(error, "Region")};
}

bool is_passing_code(std::string_view code) {
  constexpr std::array<std::string_view, 8> kPassing = {
      "RequestTimeout",          "IncompleteBody",
      "PriorRequestNotComplete", "InternalError",
      "ServiceUnavailable",      "SlowDown",
      "OperationAborted",        "ConditionalRequestConflict"};
  return std::ranges::find(kPassing, code) != kPassing.end() ||
         code.find("Throttl") != std::string_view::npos ||
         code.find("LimitExceeded") != std::string_view::npos;
}

bool is_document(std::string_view xml) {
  pugi::xml_document document;
  return load(document, xml);
}

ListPage parse_list(std::string_view xml) {
  pugi::xml_document document;
  const pugi::xml_node list = root(document, xml, "ListBucketResult");
  const bool encoded = is_encoded(list);
  ListPage page;
  for_each(list, "Contents", [&](const pugi::xml_node& each) {
    page.objects.push_back({name_text(each, "Key", encoded), parse_size(text(each, "Size")),
                            quoted_etag(text(each, "ETag")),
                            parse_utc(text(each, "LastModified"), "%Y-%m-%dT%H:%M:%S")});
  });
  for_each(list, "CommonPrefixes", [&](const pugi::xml_node& each) {
    page.prefixes.push_back(name_text(each, "Prefix", encoded));
  });
  if (text(list, "IsTruncated") != "true") return page;
  page.next = text(list, "NextContinuationToken");
  if (page.next.empty()) throw_no_next();
  return page;
}

UploadPage parse_uploads(std::string_view xml) {
  pugi::xml_document document;
  const pugi::xml_node list = root(document, xml, "ListMultipartUploadsResult");
  const bool encoded = is_encoded(list);
  UploadPage page;
  for_each(list, "Upload", [&](const pugi::xml_node& each) {
    page.uploads.push_back({name_text(each, "Key", encoded), text(each, "UploadId")});
  });
  if (text(list, "IsTruncated") == "true") {
    page.next = Upload{name_text(list, "NextKeyMarker", encoded), text(list, "NextUploadIdMarker")};
    if (page.next->key.empty()) throw_no_next();
  }
  return page;
}

std::string parse_upload_id(std::string_view xml) {
  pugi::xml_document document;
  // rclone's document has another name.
  std::string id = load(document, xml) ? text(document.document_element(), "UploadId") : "";
  if (id.empty()) throw Error(ErrorCode::kCorrupt, "the store began an upload without an id");
  return id;
}

std::optional<std::string> parse_made(std::string_view xml, std::string_view name) {
  if (!parse_refusal(xml).code.empty()) return std::nullopt;
  pugi::xml_document document;
  return quoted_etag(text(root(document, xml, name), "ETag"));
}

std::vector<NotDeleted> parse_deleted(std::string_view xml) {
  pugi::xml_document document;
  std::vector<NotDeleted> out;
  for_each(root(document, xml, "DeleteResult"), "Error", [&](const pugi::xml_node& each) {
    out.push_back({text(each, "Key"), short_text(each, "Code"), short_text(each, "Message")});
  });
  return out;
}

std::string complete_document(const std::vector<Part>& parts) {
  pugi::xml_document document;
  pugi::xml_node upload = document.append_child("CompleteMultipartUpload");
  upload.append_attribute("xmlns") = "http://s3.amazonaws.com/doc/2006-03-01/";
  for (const Part& part : parts) {
    const pugi::xml_node node = upload.append_child("Part");
    if (part.crc32) add(node, "ChecksumCRC32", base64_crc32(*part.crc32));
    add(node, "ETag", part.etag);
    add(node, "PartNumber", std::to_string(part.number));
  }
  return written(document);
}

std::string delete_document(const std::vector<std::string>& keys) {
  pugi::xml_document document;
  pugi::xml_node list = document.append_child("Delete");
  list.append_attribute("xmlns") = "http://s3.amazonaws.com/doc/2006-03-01/";
  add(list, "Quiet", "true");
  for (const std::string& key : keys) add(list.append_child("Object"), "Key", key);
  return written(document);
}

WebIdentityAnswer parse_web_identity(std::string_view xml) {
  pugi::xml_document document;
  const pugi::xml_node response = root(document, xml, "AssumeRoleWithWebIdentityResponse");
  const pugi::xml_node found =
      child(child(response, "AssumeRoleWithWebIdentityResult"), "Credentials");
  return {text(found, "AccessKeyId"), text(found, "SecretAccessKey"), text(found, "SessionToken"),
          text(found, "Expiration")};
}

}  // namespace tilestone::s3
