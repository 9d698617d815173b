#include "tilestone/engine/read/deliver_internal.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/convert_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

// Keeps the last `keep` dims. The leading ones are of prepended axes, which have size 1.
Dims drop_leading(const Dims& dims, size_t keep) {
  return Dims(dims.span().subspan(dims.size() - keep));
}

// A view of the chunk's elements in `box`, inside the bytes of `part`.
StridedView source_view(const StoredPayload& payload, const Part& part, ByteView bytes,
                        const Box& box) {
  uint64_t at = 0;
  const uint64_t size = itemsize(payload.dtype);
  for (size_t d = 0; d < box.rank(); ++d) {
    at += static_cast<uint64_t>(box.offset[d] - part.box.offset[d]) *
          static_cast<uint64_t>(payload.strides[d]) * size;
  }
  return {const_cast<std::byte*>(bytes.data()) + at, box.shape, payload.strides, size};
}

// Equal types are copied, which keeps the bits; a conversion would change signalling NaNs.
void to_host(const TensorView& target, const StridedView& source, DType stored) {
  if (target.dtype == stored) {
    strided_copy(target.strided_view(), source);
  } else {
    convert(target.strided_view(), target.dtype, source, stored);
  }
}

void to_device(const TensorView& target, const StridedView& source, DType stored) {
  const TensorView staged = TensorView::allocate(target.dtype, source.shape);
  to_host(staged, source, stored);
  target.device->from_host(0, {staged.data, staged.bytes()});
}

}  // namespace

TensorView narrow_to(const TensorView& data, const Box& box) {
  const size_t dims = data.shape.size();
  return data.narrow({drop_leading(box.offset, dims), drop_leading(box.shape, dims)});
}

void deliver(const StoredPayload& payload, const Part& part, ByteView bytes,
             const Transfer& transfer) {
  const auto common = intersect(part.box, transfer.box);
  if (!common) return;
  StridedView source = source_view(payload, part, bytes, *common);
  const TensorView target = narrow_to(transfer.target, relative_to(*common, transfer.box.offset));
  source.shape = target.shape;
  source.strides = drop_leading(source.strides, target.shape.size());
  if (target.device != nullptr) {
    to_device(target, source, payload.dtype);
  } else {
    to_host(target, source, payload.dtype);
  }
}

std::byte* plain_target(const StoredPayload& payload, const Part& part, const Transfer& transfer) {
  const TensorView& target = transfer.target;
  if (target.device != nullptr || target.dtype != payload.dtype) return nullptr;
  if (!transfer.box.contains(part.box)) return nullptr;
  const uint64_t size = itemsize(payload.dtype);
  const StridedView stored{nullptr, part.box.shape, payload.strides, size};
  if (!stored.is_contiguous() || part.size != stored.bytes()) return nullptr;
  const StridedView wanted =
      part.box == transfer.box
          ? target.strided_view()
          : narrow_to(target, relative_to(part.box, transfer.box.offset)).strided_view();
  return wanted.is_contiguous() ? wanted.data : nullptr;
}

uint64_t part_limit(const Transfer& transfer, DType stored, uint64_t buffer_bytes) {
  const bool plain = transfer.target.device == nullptr && transfer.target.dtype == stored;
  return plain ? buffer_bytes : std::min(buffer_bytes, kMaxTemporary);
}

void fill_zero(const TensorView& target) {
  if (target.bytes() == 0) return;
  if (target.device != nullptr) {
    const Bytes zeros(std::min<uint64_t>(kMaxTemporary, target.bytes()));
    for (uint64_t begin = 0; begin < target.bytes(); begin += zeros.size()) {
      const uint64_t count = std::min<uint64_t>(zeros.size(), target.bytes() - begin);
      target.device->from_host(begin, ByteView(zeros).first(count));
    }
    return;
  }
  std::byte zero[16] = {};  // as large as the largest element
  strided_copy(target.strided_view(),
               {zero, target.shape, Dims(target.shape.size(), 0), itemsize(target.dtype)});
}

}  // namespace tilestone::engine
