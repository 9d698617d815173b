#include "tilestone/engine/read/deliver_internal.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/read/convert_internal.h"
#include "tilestone/geometry/box.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kZeros = 1u << 20;  // bytes of zeros that are copied to a device at once

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

// The index of the box's first element in C order if the box's elements follow one another there.
std::optional<int64_t> run_begin(const Dims& shape, const Box& box) {
  int64_t begin = 0;
  bool is_split = false;  // a dim before this one has more than one index
  for (size_t d = 0; d < shape.size(); ++d) {
    if (is_split && box.shape[d] != shape[d]) return std::nullopt;
    is_split = is_split || box.shape[d] > 1;
    begin = begin * shape[d] + box.offset[d];
  }
  return begin;
}

// Puts the elements of `source` into the part `box` of `whole`, which is in device memory.
void to_device(const TensorView& whole, const Box& box, const StridedView& source, DType stored,
               DeviceWrites& writes) {
  const uint64_t size = itemsize(whole.dtype);
  const auto step = static_cast<int64_t>(writes.block_bytes(*whole.device) / size);
  const int64_t all = box.numel();
  for (int64_t begin = 0; begin < all; begin += step) {
    const FlatRange range{begin, std::min(all, begin + step)};
    for (const Box& part : flat_range_to_boxes(box.shape, range)) {
      Box inside = part;
      for (size_t d = 0; d < box.rank(); ++d) inside.offset[d] += box.offset[d];
      const std::optional<int64_t> run = run_begin(whole.shape, inside);
      const auto memory = run ? whole.device : whole.narrow(inside).device;
      const uint64_t at = run ? static_cast<uint64_t>(*run) * size : 0;
      const uint64_t bytes = static_cast<uint64_t>(part.numel()) * size;
      writes.write(memory, at, bytes, [&](std::byte* host) {
        to_host(TensorView::contiguous(host, whole.dtype, part.shape), source.narrow(part), stored);
      });
    }
  }
}

Box without_leading(const Box& box, size_t keep) {
  return {drop_leading(box.offset, keep), drop_leading(box.shape, keep)};
}

}  // namespace

TensorView narrow_to(const TensorView& data, const Box& box) {
  return data.narrow(without_leading(box, data.shape.size()));
}

void deliver(const StoredPayload& payload, const Part& part, ByteView bytes,
             const Transfer& transfer, DeviceWrites& writes) {
  const auto common = intersect(part.box, transfer.box);
  if (!common) return;
  const TensorView& target = transfer.target;
  const Box box = without_leading(relative_to(*common, transfer.box.offset), target.shape.size());
  StridedView source = source_view(payload, part, bytes, *common);
  source.shape = box.shape;
  source.strides = drop_leading(source.strides, target.shape.size());
  if (target.device != nullptr) {
    to_device(target, box, source, payload.dtype, writes);
  } else {
    to_host(target.narrow(box), source, payload.dtype);
  }
}

void put_elements(const TensorView& target, const StridedView& source, DType stored) {
  if (target.device == nullptr) return to_host(target, source, stored);
  const TensorView host = TensorView::allocate(target.dtype, target.shape);
  to_host(host, source, stored);
  const DeviceCopy copy = target.device_copy({host.data, host.bytes()});
  copy_now(CopyTo::kDevice, {&copy, 1});
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
  const bool plain = transfer.target.dtype == stored;
  return plain ? buffer_bytes : std::min(buffer_bytes, kMaxTemporary);
}

void fill_zero(const TensorView& target) {
  if (target.bytes() == 0) return;
  if (target.device != nullptr) {
    Bytes zeros(std::min<uint64_t>(kZeros, target.bytes()));
    std::vector<DeviceCopy> copies;
    for (uint64_t begin = 0; begin < target.bytes(); begin += zeros.size()) {
      const uint64_t count = std::min<uint64_t>(zeros.size(), target.bytes() - begin);
      copies.push_back({target.device, begin, MutableByteView(zeros).first(count)});
    }
    return copy_now(CopyTo::kDevice, copies);
  }
  std::byte zero[16] = {};  // as large as the largest element
  strided_copy(target.strided_view(),
               {zero, target.shape, Dims(target.shape.size(), 0), itemsize(target.dtype)});
}

}  // namespace tilestone::engine
