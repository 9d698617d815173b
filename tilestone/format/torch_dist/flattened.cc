// Megatron-Core up to 0.15 split a tensor of shape [X, Y, Z] into a regular grid of local shards of
// shape [x, y, z], flattened each shard and cut it into slices. It stored the tensor with the shape
// [X/x, Y/y, Z/z, xyz]. A stored chunk is one slice: a chunk at offset [i, j, k, a] with the shape
// [1, 1, 1, n] holds the elements a, ..., a + n - 1 of the flattened shard at [ix, jy, kz]. A slice
// consists of a few boxes of the shard, and each box is a run of the slice's elements in C order.
#include "tilestone/format/torch_dist/flattened_internal.h"

#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/geometry/box.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone::torch_dist {
namespace {

// A slice has up to 2n - 1 boxes of n dims. The limit bounds the memory that a small file can
// claim.
constexpr size_t kMaxFlattenedDims = 8;

[[noreturn]] void corrupt_flattened(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "checkpoint metadata: " + problem);
}

// The shape of a local shard.
Dims shard_shape(const Dims& stored, const Dims& original) {
  if (original.size() > kMaxFlattenedDims) {
    throw Error(ErrorCode::kUnsupported, "the flattened tensor has " +
                                             std::to_string(original.size()) + " dims; at most " +
                                             std::to_string(kMaxFlattenedDims) + " are supported");
  }
  Dims shard = original;
  bool fits = stored.size() == original.size() + 1;
  for (size_t d = 0; fits && d < original.size(); ++d) {
    fits = stored[d] > 0 && original[d] % stored[d] == 0;
    if (fits) shard[d] /= stored[d];
  }
  if (fits && numel(shard) == stored[original.size()]) return shard;
  corrupt_flattened("the flattened tensor's shape in mcore_data, " + to_string(original) +
                    ", contradicts its stored shape " + to_string(stored));
}

void check_disjoint(const StoredTensor& tensor) {
  std::vector<Box> boxes;
  boxes.reserve(tensor.chunks.size());
  for (const StoredChunk& chunk : tensor.chunks) boxes.push_back(chunk.box);
  if (const auto overlap = find_overlap(boxes)) {
    corrupt_flattened("the chunks " + to_string(boxes[overlap->first]) + " and " +
                      to_string(boxes[overlap->second]) + " of a flattened tensor overlap");
  }
}

// Adds the chunks of the original tensor that a stored chunk contains.
void add_parts(const StoredChunk& stored, const Dims& shard, std::vector<StoredChunk>& parts) {
  if (stored.box.empty()) return;
  const size_t dims = shard.size();
  Dims origin(dims, 0);
  for (size_t d = 0; d < dims; ++d) {
    if (stored.box.shape[d] != 1) {
      corrupt_flattened("the chunk " + to_string(stored.box) +
                        " of a flattened tensor is not a slice of one local shard");
    }
    origin[d] = stored.box.offset[d] * shard[d];
  }
  FlatPart flat{stored.box.shape[dims], 0};
  for (Box& box : flat_range_to_boxes(shard, {stored.box.offset[dims], stored.box.end(dims)})) {
    const int64_t elements = box.numel();
    for (size_t d = 0; d < dims; ++d) box.offset[d] += origin[d];
    parts.push_back({std::move(box), stored.at, flat});
    flat.begin += elements;
  }
}

}  // namespace

void restore_original(StoredTensor& tensor, const Dims& original) {
  const Dims shard = shard_shape(tensor.shape, original);
  check_disjoint(tensor);
  std::vector<StoredChunk> parts;
  parts.reserve(tensor.chunks.size());
  for (const StoredChunk& chunk : tensor.chunks) add_parts(chunk, shard, parts);
  tensor.shape = original;
  tensor.chunks = std::move(parts);
}

}  // namespace tilestone::torch_dist
