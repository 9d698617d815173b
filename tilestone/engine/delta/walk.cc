#include "tilestone/engine/delta/walk_internal.h"

#include <algorithm>
#include <numeric>

#include "tilestone/base/error_context.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kAtOnce = 64u << 20;  // bytes of copies at a time

// The elements of a part in host memory: where they are, or a copy of them.
class PartMemory {
 public:
  PartMemory(const TensorView& view, const Box& outer, const Box& box, Bytes& scratch) {
    if (!view.has_data()) return;
    const uint64_t item = itemsize(view.dtype);
    const uint64_t size = static_cast<uint64_t>(box.numel()) * item;
    const auto begin = place_if_contiguous(box, outer, item);
    if (begin && view.device == nullptr && view.strided_view().is_contiguous()) {
      elements_ = {view.data + *begin, size};
      return;
    }
    scratch.resize(size);
    elements_ = scratch;
    is_copy_ = true;
    if (begin && view.device != nullptr) {
      on_device_ = {view.device, *begin, elements_};
      return;
    }
    const TensorView part = view.narrow(relative_to(box, outer.offset));
    if (part.device != nullptr) {
      on_device_ = part.device_copy(elements_);
    } else {
      strided_ = part.strided_view();
    }
  }

  MutableByteView elements() const { return elements_; }
  bool is_copy() const { return is_copy_; }
  const DeviceCopy& on_device() const { return on_device_; }  // without memory: it is not
  void pack() const {
    if (strided_.data != nullptr) strided_copy(packed(), strided_);
  }
  void unpack() const {
    if (strided_.data != nullptr) strided_copy(strided_, packed());
  }

 private:
  StridedView packed() const {
    return StridedView::contiguous(elements_.data(), strided_.shape, strided_.itemsize);
  }

  MutableByteView elements_;
  bool is_copy_ = false;
  DeviceCopy on_device_;
  StridedView strided_;
};

}  // namespace

std::vector<size_t> all_of(std::span<const DeltaShard> shards) {
  std::vector<size_t> indices(shards.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

std::vector<ShardPart> parts_of(std::span<const DeltaShard> shards,
                                const std::vector<size_t>& some) {
  std::vector<ShardPart> parts;
  for (const size_t i : some) {
    const ShardSum& sum = shards[i].sum;
    for (Box& box : pieces_of(sum.box, itemsize(sum.dtype))) parts.push_back({i, std::move(box)});
  }
  return parts;
}

void walk(std::span<const DeltaShard> shards, std::vector<ShardPart> parts, ThreadPool& threads,
          const PartWork& how) {
  std::vector<Bytes> scratch;
  for (size_t first = 0, end = 0; first < parts.size(); first = end) {
    std::vector<PartMemory> now, base;
    std::vector<DeviceCopy> fetched;
    for (uint64_t copied = 0; end < parts.size() && copied < kAtOnce; ++end) {
      ShardPart& part = parts[end];
      const DeltaShard& shard = shards[part.shard];
      scratch.resize(std::max(scratch.size(), 2 * (now.size() + 1)));
      const auto add = [&](const TensorView& view, std::vector<PartMemory>& to, size_t version) {
        const PartMemory& memory =
            to.emplace_back(view, shard.sum.box, part.box, scratch[2 * to.size() + version]);
        if (memory.on_device().memory != nullptr) fetched.push_back(memory.on_device());
        if (memory.is_copy()) copied += memory.elements().size();
        return memory.elements();
      };
      part.now = add(shard.now, now, 0);
      part.is_copy = now.back().is_copy();
      part.base = add(shard.base, base, 1);
    }
    copy_now(CopyTo::kHost, fetched);
    threads.parallel_for(end - first, [&](size_t i) {
      with_key(shards[parts[first + i].shard].sum.key, [&] {
        now[i].pack();
        base[i].pack();
        how.work(parts[first + i]);
        if (how.writes_back) now[i].unpack();
      });
    });
    if (how.writes_back) copy_now(CopyTo::kDevice, fetched);
    for (size_t i = first; i < end && how.then != nullptr; ++i) how.then(parts[i]);
  }
}

void compare_shards(std::span<DeltaShard> shards, bool sum_base, ThreadPool& threads,
                    const std::function<void(ShardPart& part)>& take) {
  const auto work = [&](ShardPart& part) {
    const ShardSum& sum = shards[part.shard].sum;
    const uint64_t item = itemsize(sum.dtype);
    BoxCrc before(part.box, sum.shape, item), after(part.box, sum.shape, item);
    const auto add = [&](ByteView base, ByteView now) {
      if (sum_base) before.add(base);
      after.add(now);
    };
    if (part.base.empty() || part.now.empty()) {
      add(part.base, part.now);
      if (!part.now.empty()) part.encoded = EncodedPiece{};
    } else {
      part.encoded = encode_piece(part.base, part.now, item, add);
    }
    part.before = before.portion();
    part.after = after.portion();
  };
  const auto then = [&](ShardPart& part) {
    ShardSum& sum = shards[part.shard].sum;
    sum.before ^= part.before;
    sum.after ^= part.after;
    take(part);
  };
  walk(shards, parts_of(shards, all_of(shards)), threads, {.work = work, .then = then});
}

std::optional<uint64_t> place_if_contiguous(const Box& inner, const Box& outer, uint64_t itemsize) {
  size_t dim = inner.rank();
  while (dim > 0 && inner.shape[dim - 1] == outer.shape[dim - 1]) --dim;
  for (size_t d = 0; d + 1 < dim; ++d) {
    if (inner.shape[d] != 1) return std::nullopt;
  }
  const Dims strides = contiguous_strides(outer.shape);
  uint64_t place = 0;
  for (size_t d = 0; d < inner.rank(); ++d) {
    place += static_cast<uint64_t>((inner.offset[d] - outer.offset[d]) * strides[d]) * itemsize;
  }
  return place;
}

}  // namespace tilestone::engine
