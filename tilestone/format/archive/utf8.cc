#include <cstdint>
#include <cstring>

#include "tilestone/format/archive/utf8_internal.h"

namespace tilestone::archive {
namespace {

// The end of a prefix that is valid and ends with a whole character: of characters of one or two
// bytes, as in bytes that Python has pickled as text. Looks at eight bytes at a time. In each byte
// of the words below only the highest bit counts.
size_t narrow_prefix(std::string_view text) {
  constexpr uint64_t kHigh = 0x8080808080808080;
  uint64_t open = 0;  // whether the last byte begins a character of two bytes
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + i, 8);  // little-endian: the first byte is the lowest
    const uint64_t second = word << 1, third = word << 2;
    const uint64_t inner = word & ~second & kHigh;         // 10xxxxxx
    const uint64_t lead = word & second & ~third & kHigh;  // 110xxxxx
    const uint64_t other = word & second & third & kHigh;
    const uint64_t short_lead = lead & ~((word & 0x1e1e1e1e1e1e1e1e) + 0x7e7e7e7e7e7e7e7e);
    if (other != 0 || short_lead != 0 || inner != (lead << 8 | open)) break;
    open = lead >> 56;
  }
  return open != 0 ? i - 1 : i;
}

// The number of bytes of a character whose first byte is `lead`; 0 if no character has it.
size_t length_of(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xc2) return 0;
  if (lead < 0xe0) return 2;
  if (lead < 0xf0) return 3;
  return lead < 0xf5 ? 4 : 0;
}

}  // namespace

bool is_utf8(std::string_view text) {
  size_t i = narrow_prefix(text);
  while (i < text.size()) {
    const auto lead = static_cast<uint8_t>(text[i]);
    const size_t length = length_of(lead);
    if (length == 0 || length > text.size() - i) return false;
    for (size_t k = 1; k < length; ++k) {
      if ((static_cast<uint8_t>(text[i + k]) & 0xc0) != 0x80) return false;
    }
    if (length > 2) {
      const auto second = static_cast<uint8_t>(text[i + 1]);
      if (lead == 0xe0 && second < 0xa0) return false;   // overlong
      if (lead == 0xf0 && second < 0x90) return false;   // overlong
      if (lead == 0xf4 && second >= 0x90) return false;  // beyond U+10FFFF
    }
    i += length;
  }
  return true;
}

}  // namespace tilestone::archive
