#include "tilestone/format/format_testing.h"

#include <cstring>
#include <stdexcept>

#include "tilestone/base/checksum.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone {
namespace {

Bytes payload(const Segment& segment) {
  Bytes bytes(segment.tensor->bytes());
  pack_range(segment.tensor->strided_view(), 0, bytes);
  bytes.resize(segment.size);
  if (segment.padding) segment.padding->spread(0, bytes);
  return bytes;
}

}  // namespace

Bytes with_crc32(const Literal& literal, uint32_t crc) {
  Bytes bytes = literal.bytes;
  for (uint64_t at : literal.crc32_at) std::memcpy(bytes.data() + at, &crc, sizeof(crc));
  return bytes;
}

Bytes render(const ItemRecipe& recipe) {
  Bytes out(recipe.padding);
  uint32_t crc = 0;
  for (const Segment& segment : recipe.segments) {
    Bytes bytes;
    if (segment.tensor != nullptr) {
      bytes = payload(segment);
      crc = crc32(bytes);
    } else {
      bytes = with_crc32(*segment.literal, crc);
    }
    if (bytes.size() != segment.size) throw std::logic_error("a segment of another size");
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  if (out.size() != recipe.padding + recipe.length) throw std::logic_error("another length");
  return out;
}

}  // namespace tilestone
