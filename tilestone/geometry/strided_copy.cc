#include "tilestone/geometry/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/geometry/box.h"
#include "tilestone/geometry/strided_loops_internal.h"

namespace tilestone {
namespace {

// The view with as few dims as its C order allows.
StridedView coalesced(const StridedView& view) {
  StridedView out{view.data, {}, {}, view.itemsize};
  for (size_t d = 0; d < view.shape.size(); ++d) {
    const int64_t count = view.shape[d];
    if (count == 1) continue;
    const size_t last = out.shape.size();
    if (last > 0 && out.strides[last - 1] == view.strides[d] * count) {
      out.shape[last - 1] *= count;
      out.strides[last - 1] = view.strides[d];
    } else {
      out.shape.push_back(count);
      out.strides.push_back(view.strides[d]);
    }
  }
  return out;
}

// The address of element `index` of the view in C order.
std::byte* element(const StridedView& view, int64_t index) {
  int64_t at = 0;
  for (size_t d = view.shape.size(); d-- > 0;) {
    at += index % view.shape[d] * view.strides[d];
    index /= view.shape[d];
  }
  return view.data + at * static_cast<int64_t>(view.itemsize);
}

void check_range(const StridedView& view, uint64_t begin, uint64_t size) {
  const uint64_t total = view.bytes();
  if (begin > total || size > total - begin) {
    throw Error(ErrorCode::kInternal, "bytes [" + std::to_string(begin) + ", +" +
                                          std::to_string(size) + ") are outside a tensor of " +
                                          std::to_string(total) + " bytes");
  }
}

}  // namespace

StridedView StridedView::contiguous(std::byte* data, const Dims& shape, uint64_t itemsize) {
  return {data, shape, contiguous_strides(shape), itemsize};
}

bool StridedView::is_contiguous() const {
  int64_t expected = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] == 0) return true;
    if (shape[d] != 1 && strides[d] != expected) {
      return std::find(shape.begin(), shape.end(), 0) != shape.end();
    }
    expected *= shape[d];
  }
  return true;
}

StridedView StridedView::narrow(const Box& box) const {
  StridedView part = *this;
  part.shape = box.shape;
  int64_t at = 0;
  for (size_t d = 0; d < shape.size(); ++d) at += box.offset[d] * strides[d];
  if (!box.empty()) part.data += at * static_cast<int64_t>(itemsize);
  return part;
}

uint64_t StridedView::bytes() const { return static_cast<uint64_t>(numel(shape)) * itemsize; }

void strided_copy(const StridedView& target, const StridedView& source) {
  if (target.shape != source.shape || target.itemsize != source.itemsize) {
    throw Error(ErrorCode::kInternal,
                "strided copy: the source has shape " + to_string(source.shape) + " and items of " +
                    std::to_string(source.itemsize) + " bytes, but the target has shape " +
                    to_string(target.shape) + " and items of " + std::to_string(target.itemsize) +
                    " bytes");
  }
  run_nest(make_nest(target, source));
}

void pack_range(const StridedView& source, uint64_t begin, MutableByteView out) {
  check_range(source, begin, out.size());
  if (out.empty()) return;
  std::byte* target = out.data();
  uint64_t left = out.size();
  const auto copy_bytes = [&](const std::byte* from, uint64_t size) {  // of one element, or of all
    std::memcpy(target, from, size);
    target += size;
    begin += size;
    left -= size;
  };
  if (source.is_contiguous()) return copy_bytes(source.data + begin, left);

  const StridedView view = coalesced(source);
  const uint64_t item = view.itemsize;
  if (const uint64_t inside = begin % item; inside != 0) {
    const auto index = static_cast<int64_t>(begin / item);
    copy_bytes(element(view, index) + inside, std::min(left, item - inside));
  }
  const auto first = static_cast<int64_t>(begin / item);
  const auto last = first + static_cast<int64_t>(left / item);
  for (const Box& box : flat_range_to_boxes(view.shape, {first, last})) {
    strided_copy(StridedView::contiguous(target, box.shape, item), view.narrow(box));
    target += static_cast<uint64_t>(box.numel()) * item;
  }
  if (const uint64_t rest = left % item; rest != 0) copy_bytes(element(view, last), rest);
}

uint32_t pack_range_crc32(const StridedView& source, uint64_t begin, MutableByteView out,
                          uint32_t seed) {
  constexpr size_t kBlock = 256 << 10;  // bytes; fits the L2 cache between packing and checksumming
  if (source.is_contiguous()) {
    check_range(source, begin, out.size());
    return copy_crc32(out, {source.data + begin, out.size()}, seed);
  }
  while (!out.empty()) {
    const MutableByteView block = out.first(std::min(kBlock, out.size()));
    pack_range(source, begin, block);
    seed = crc32(block, seed);
    begin += block.size();
    out = out.subspan(block.size());
  }
  return seed;
}

}  // namespace tilestone
