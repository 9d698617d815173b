// Passes over the elements of many tensors, part by part, on all threads.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/delta/encoding_internal.h"
#include "tilestone/engine/delta/sums_internal.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone::engine {

// A box of a tensor, in one version or in two. Without data: it is not in that version.
struct DeltaShard {
  ShardSum sum;
  TensorView now = {}, base = {};
};

// A box inside that of a shard, with at most kPieceBytes.
struct ShardPart {
  size_t shard = 0;  // index
  Box box;
  // In C order: the tensor's own memory, or a copy if it is strided or on a device. Empty: not in
  // that version.
  MutableByteView now = {}, base = {};
  bool is_copy = false;  // `now`
  // What is found out about it.
  uint32_t before = 0, after = 0;  // portions of the tensor's CRC-32 (box_crc_internal.h)
  std::optional<EncodedPiece> encoded = {};
};

std::vector<size_t> all_of(std::span<const DeltaShard> shards);  // 0, 1, ...
// Some shards, by their indices, cut into parts.
std::vector<ShardPart> parts_of(std::span<const DeltaShard> shards,
                                const std::vector<size_t>& some);

struct PartWork {
  std::function<void(ShardPart& part)> work;            // of many parts at once
  std::function<void(ShardPart& part)> then = nullptr;  // after that, one part after the other
  bool writes_back = false;  // `work` changes `now`, and a copy goes back to where it came from
};
// What is copied is copied in the order of the parts, 64 MiB at a time; what is not, is worked on
// all at once. An error has the tensor's key.
void walk(std::span<const DeltaShard> shards, std::vector<ShardPart> parts, ThreadPool& threads,
          const PartWork& how);

// Encodes what has changed from `base` to `now`, and sums both in the same pass. Without a base
// everything is new; without `now` everything is removed. `sum_base`: whether `before` is wanted.
// `take` gets the parts in their order, once their portions are in the sums of their shards;
// `encoded` is nullopt if nothing has changed.
void compare_shards(std::span<DeltaShard> shards, bool sum_base, ThreadPool& threads,
                    const std::function<void(ShardPart& part)>& take);

// Where the inner box begins in the elements of the outer one, in bytes, if its elements follow one
// another there.
std::optional<uint64_t> place_if_contiguous(const Box& inner, const Box& outer, uint64_t itemsize);

}  // namespace tilestone::engine
