#include <cstdint>
#include <cstring>

#include "tilestone/base/printable.h"
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

}  // namespace

bool is_utf8(std::string_view text) {
  text.remove_prefix(narrow_prefix(text));
  while (!text.empty()) {
    const CodePoint point = first_code_point(text);
    if (point.size == 0) return false;
    text.remove_prefix(point.size);
  }
  return true;
}

}  // namespace tilestone::archive
