#include "tilestone/geometry/strided_copy_testing.h"

#include <algorithm>
#include <cstring>

namespace tilestone {

void unpack_range(const StridedView& target, uint64_t begin, ByteView in) {
  while (!in.empty()) {
    auto index = static_cast<int64_t>(begin / target.itemsize);
    std::byte* element = target.data;
    for (size_t d = target.shape.size(); d-- > 0;) {
      const int64_t steps = index % target.shape[d] * target.strides[d];
      element += steps * static_cast<int64_t>(target.itemsize);
      index /= target.shape[d];
    }
    const uint64_t inside = begin % target.itemsize;
    const uint64_t size = std::min<uint64_t>(in.size(), target.itemsize - inside);
    std::memcpy(element + inside, in.data(), size);
    begin += size;
    in = in.subspan(size);
  }
}

}  // namespace tilestone
