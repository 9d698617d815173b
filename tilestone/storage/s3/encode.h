// Texts as HTTP and S3 write them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tilestone/base/bytes.h"

namespace tilestone::s3 {

// Percent-encodes each byte but A-Z a-z 0-9 - . _ ~ and those of `keep`.
std::string url_encode(std::string_view text, std::string_view keep = "");
// The reverse, where + is a space, as in lists of keys. A % without two hex digits stays.
std::string url_decode(std::string_view text);

std::string hex(ByteView bytes);  // lower case
std::string base64(ByteView bytes);
// As x-amz-checksum-crc32: base64 of the big-endian bytes.
std::string base64_crc32(uint32_t crc);

// A time in UTC, in the form of strptime; what follows it is ignored. nullopt: it has another form.
std::optional<std::chrono::system_clock::time_point> parse_utc(const std::string& text,
                                                               const char* form);

std::string lower_case(std::string_view text);  // of ASCII
std::string_view trimmed(std::string_view text);

}  // namespace tilestone::s3
