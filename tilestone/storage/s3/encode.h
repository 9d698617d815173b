// Texts as HTTP and S3 write them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tilestone/base/bytes.h"

namespace tilestone::s3 {

std::string base64(ByteView bytes);
// As x-amz-checksum-crc32: base64 of the big-endian bytes.
std::string base64_crc32(uint32_t crc);

// A time in UTC, in the form of strptime; what follows it is ignored. nullopt: it has another form.
std::optional<std::chrono::system_clock::time_point> parse_utc(const std::string& text,
                                                               const char* form);

std::string lower_case(std::string_view text);  // of ASCII
std::string_view trimmed(std::string_view text);
std::string without_slash(std::string url);  // without those at its end

}  // namespace tilestone::s3
