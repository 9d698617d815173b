#include "tilestone/engine/read/shared_targets_internal.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {

SharedTargets::MemoryRange SharedTargets::extent_of(const TensorView& view, uint32_t item,
                                                    uint32_t piece) {
  const auto size = static_cast<int64_t>(itemsize(view.dtype));
  MemoryRange extent{view.data, view.data + size, item, piece};
  for (size_t d = 0; d < view.shape.size(); ++d) {
    const int64_t steps = (view.shape[d] - 1) * view.strides[d] * size;
    (steps < 0 ? extent.begin : extent.end) += steps;
  }
  return extent;
}

void SharedTargets::part(std::vector<TensorItem>& tensors) {
  std::vector<MemoryRange> dense, sparse;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    for (uint32_t p = 0; p < tensors[i].pieces.size(); ++p) {
      const TensorView& view = tensors[i].pieces[p].data;
      if (view.data == nullptr || numel(view.shape) == 0) continue;
      auto& kind = view.strided_view().is_contiguous() ? dense : sparse;
      kind.push_back(extent_of(view, i, p));
    }
  }
  part_dense(tensors, dense);
  part_sparse(tensors, sparse);
}

void SharedTargets::give_own_memory(std::vector<TensorItem>& tensors, const MemoryRange& extent,
                                    uint32_t owner) {
  TensorView& view = tensors[extent.item].pieces[extent.piece].data;
  TensorView fresh = TensorView::allocate(view.dtype, view.shape);
  parted_.push_back({extent, owner, std::exchange(view, std::move(fresh))});
}

void SharedTargets::part_dense(std::vector<TensorItem>& tensors, std::vector<MemoryRange>& dense) {
  std::sort(dense.begin(), dense.end(), [](const MemoryRange& a, const MemoryRange& b) {
    return std::tie(a.begin, a.item, a.piece) < std::tie(b.begin, b.item, b.piece);
  });
  for (const MemoryRange& extent : dense) {
    MemoryRange fresh = extent;
    if (!segments_.empty() && extent.begin < segments_.back().end) {
      give_own_memory(tensors, extent, segments_.back().item);
      fresh.begin = segments_.back().end;
    }
    if (fresh.begin < fresh.end) segments_.push_back(fresh);
  }
}

void SharedTargets::part_sparse(std::vector<TensorItem>& tensors,
                                std::vector<MemoryRange>& sparse) {
  const auto view_of = [&](const MemoryRange& extent) -> const TensorView& {
    return tensors[extent.item].pieces[extent.piece].data;
  };
  const auto before = [&](const MemoryRange& a, const MemoryRange& b) {
    const TensorView &x = view_of(a), &y = view_of(b);
    return std::tie(x.data, x.dtype, x.shape, x.strides, a.item, a.piece) <
           std::tie(y.data, y.dtype, y.shape, y.strides, b.item, b.piece);
  };
  std::sort(sparse.begin(), sparse.end(), before);
  const MemoryRange* last = nullptr;
  TensorView seen;
  for (const MemoryRange& extent : sparse) {
    const TensorView view = view_of(extent);
    const bool same = last != nullptr && view.data == seen.data && view.dtype == seen.dtype &&
                      view.shape == seen.shape && view.strides == seen.strides;
    const auto segment = first_segment_after(extent.begin);
    if (segment != segments_.end() && segment->begin < extent.end) {
      give_own_memory(tensors, extent, kAnyOwner);
    } else if (same) {
      give_own_memory(tensors, extent, last->item);
    }
    if (!same) last = &extent;
    seen = view;
  }
}

// The first segment that ends after an address.
std::vector<SharedTargets::MemoryRange>::const_iterator SharedTargets::first_segment_after(
    const std::byte* address) const {
  return std::upper_bound(
      segments_.begin(), segments_.end(), address,
      [](const std::byte* at, const MemoryRange& segment) { return at < segment.end; });
}

// Pieces are put back in the order in which they were taken, so that the elements which a piece
// shares with earlier ones are in memory when it is compared.
void SharedTargets::join(std::vector<TensorItem>& tensors) {
  for (Parted& parted : parted_) {
    TensorView& view = tensors[parted.extent.item].pieces[parted.extent.piece].data;
    const TensorView loaded = std::exchange(view, parted.memory);
    const uint32_t other = disagreeing(parted, loaded);
    if (other != kAnyOwner) {
      throw Error(ErrorCode::kMismatch, "the tensor shares memory with \"" + tensors[other].key +
                                            "\", but the checkpoint has different values for the "
                                            "two")
          .with_key(tensors[parted.extent.item].key)
          .with_hint("load the two into separate memory, or load only one of them");
    }
    strided_copy(view.strided_view(), loaded.strided_view());
  }
  parted_.clear();
  segments_.clear();
}

uint32_t SharedTargets::disagreeing(const Parted& parted, const TensorView& loaded) const {
  if (parted.owner == kAnyOwner) return disagreeing_element(parted, loaded);
  if (!parted.memory.strided_view().is_contiguous()) {  // the owner's view is equal
    Bytes packed(loaded.bytes());
    pack_range(parted.memory.strided_view(), 0, packed);
    const bool same = std::memcmp(packed.data(), loaded.data, packed.size()) == 0;
    return same ? kAnyOwner : parted.owner;
  }
  auto segment = first_segment_after(parted.extent.begin);
  // The piece's own segments were filled by no other piece.
  for (; segment != segments_.end() && segment->begin < parted.extent.end; ++segment) {
    if (segment->item == parted.extent.item && segment->piece == parted.extent.piece) continue;
    const std::byte* begin = std::max(segment->begin, parted.extent.begin);
    const std::byte* end = std::min(segment->end, parted.extent.end);
    const std::byte* found = loaded.data + (begin - parted.extent.begin);
    const auto size = static_cast<size_t>(end - begin);
    if (std::memcmp(found, begin, size) != 0) return segment->item;
  }
  return kAnyOwner;
}

uint32_t SharedTargets::disagreeing_element(const Parted& parted, const TensorView& loaded) const {
  const TensorView& memory = parted.memory;
  const auto size = static_cast<int64_t>(itemsize(memory.dtype));
  Dims index(memory.shape.size(), 0);
  const std::byte* at = memory.data;
  const int64_t count = numel(memory.shape);
  for (int64_t i = 0; i < count; ++i) {
    const auto segment = first_segment_after(at);
    const bool shared = segment != segments_.end() && segment->begin <= at;
    if (shared && std::memcmp(at, loaded.data + i * size, static_cast<size_t>(size)) != 0) {
      return segment->item;
    }
    for (size_t d = index.size(); d-- > 0;) {
      at += memory.strides[d] * size;
      if (++index[d] < memory.shape[d]) break;
      at -= memory.strides[d] * size * memory.shape[d];
      index[d] = 0;
    }
  }
  return kAnyOwner;
}

}  // namespace tilestone::engine
