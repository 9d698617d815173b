// Tests that slices of Megatron-Core's flattened tensors become the right boxes.
#include "tilestone/format/torch_dist/flattened_internal.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "tilestone/base/error.h"
#include "tilestone/geometry/box.h"

namespace tilestone::torch_dist::flattened_test {

// The flat indices, in a tensor of `shape`, of a box's elements in C order.
std::vector<int64_t> indices_of(const Dims& shape, const Box& box) {
  std::vector<int64_t> indices{0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t outer : indices) {
      for (int64_t i = box.offset[d]; i < box.end(d); ++i) next.push_back(outer * shape[d] + i);
    }
    indices = std::move(next);
  }
  return indices;
}

// A tensor of local shards, each flattened and cut at random, as in `.metadata`. The items are at
// offsets 0, 1, ... of their file.
StoredTensor flattened(const Dims& shape, const Dims& counts, std::mt19937_64& random) {
  StoredTensor tensor{"t", {}, DType::kFloat32, counts, {}};
  const int64_t elements = numel(shape) / numel(counts);
  tensor.shape.push_back(elements);
  for (int64_t shard = 0; shard < numel(counts); ++shard) {
    Box box{Dims(tensor.shape.size(), 0), Dims(tensor.shape.size(), 1)};
    for (int64_t d = static_cast<int64_t>(counts.size()) - 1, rest = shard; d >= 0; --d) {
      const auto dim = static_cast<size_t>(d);
      box.offset[dim] = rest % counts[dim];
      rest /= counts[dim];
    }
    int64_t& at = box.offset[counts.size()];
    int64_t& size = box.shape[counts.size()];
    for (at = 0; at < elements; at += size) {  // sometimes an empty slice
      size = static_cast<int64_t>(random() % static_cast<uint64_t>(elements - at + 1));
      if (random() % 3 == 0) size = std::min<int64_t>(size, 3);
      tensor.chunks.push_back({box, {.offset = tensor.chunks.size()}});
    }
  }
  std::shuffle(tensor.chunks.begin(), tensor.chunks.end(), random);
  return tensor;
}

// For each element of the original tensor, the item in which it is stored and the place in the
// item: once computed from the stored form, once from the chunks of the original tensor.
using Places = std::vector<std::pair<uint64_t, int64_t>>;

Places stored_places(const StoredTensor& stored, const Dims& shape) {
  Places places(static_cast<size_t>(numel(shape)), {~uint64_t{0}, 0});
  Dims shard = shape;
  for (size_t d = 0; d < shape.size(); ++d) shard[d] /= stored.shape[d];
  for (const StoredChunk& chunk : stored.chunks) {
    Box box = Box::whole(shard);
    for (size_t d = 0; d < shape.size(); ++d) box.offset[d] = chunk.box.offset[d] * shard[d];
    const std::vector<int64_t> of_shard = indices_of(shape, box);
    const int64_t first = chunk.box.offset[shape.size()];
    for (int64_t i = 0; i < chunk.box.shape[shape.size()]; ++i) {
      places[static_cast<size_t>(of_shard[static_cast<size_t>(first + i)])] = {chunk.at.offset, i};
    }
  }
  return places;
}

Places restored_places(const StoredTensor& tensor) {
  Places places(static_cast<size_t>(numel(tensor.shape)), {~uint64_t{0}, 0});
  for (const StoredChunk& chunk : tensor.chunks) {
    int64_t at = chunk.flat->begin;
    for (const int64_t index : indices_of(tensor.shape, chunk.box)) {
      places[static_cast<size_t>(index)] = {chunk.at.offset, at++};
    }
  }
  return places;
}

struct Layout {
  Dims shape;
  Dims counts;
};

const Layout kLayouts[] = {
    {{}, {}},
    {{48}, {2}},
    {{24, 6}, {1, 1}},
    {{24, 6}, {3, 1}},
    {{5, 24}, {1, 4}},
    {{12, 6}, {4, 3}},
    {{4, 3, 8}, {1, 1, 2}},
    {{6, 4, 5}, {3, 2, 1}},
    {{3, 6, 5, 2}, {3, 2, 1, 2}},
};

TEST(Flattened, EachElementOfTheOriginalTensorIsFoundWhereASliceHoldsIt) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 40; ++round) {
    for (const auto& [shape, counts] : kLayouts) {
      SCOPED_TRACE(to_string(shape) + " in " + to_string(counts) + ", " + std::to_string(round));
      const StoredTensor stored = flattened(shape, counts, random);
      StoredTensor restored = stored;
      restore_original(restored, shape);
      EXPECT_EQ(restored.shape, shape);
      EXPECT_EQ(restored_places(restored), stored_places(stored, shape));
    }
  }
}

TEST(Flattened, ChunksOfOneItemFollowOneAnotherFromItsFirstElementOn) {
  std::mt19937_64 random(2);
  StoredTensor tensor = flattened({6, 4, 5}, {3, 2, 1}, random);
  restore_original(tensor, {6, 4, 5});
  int64_t next = 0;
  for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
    const StoredChunk& chunk = tensor.chunks[c];
    EXPECT_EQ(chunk.flat->begin, next);
    EXPECT_EQ(tensor.chunks[tensor.first_of_item(c)].at.offset, chunk.at.offset);
    next = chunk.flat->begin + chunk.box.numel();
    if (next == chunk.flat->elements) next = 0;
  }
  EXPECT_EQ(next, 0);
}

ErrorCode refusal(const Dims& original, const std::function<void(StoredTensor&)>& change = {}) {
  std::mt19937_64 random(3);
  StoredTensor tensor = flattened({4, 6}, {2, 1}, random);
  if (change) change(tensor);
  try {
    restore_original(tensor, original);
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST(Flattened, AShapeThatTheStoredOneContradictsIsRefused) {
  EXPECT_EQ(refusal({4, 6}), ErrorCode::kInternal);
  const Dims wrong[] = {{4, 7}, {6, 4, 1}, {24}, {}, {5, 6}, {2, 6}, {0, 6}, {4, 0}, {4, 6, 1}};
  for (const Dims& shape : wrong)
    EXPECT_EQ(refusal(shape), ErrorCode::kCorrupt) << to_string(shape);
  EXPECT_EQ(refusal({4, 6}, [](StoredTensor& t) { t.shape = {0, 1, 12}; }), ErrorCode::kCorrupt);
  EXPECT_EQ(refusal(Dims(9, 1)), ErrorCode::kUnsupported);
}

TEST(Flattened, ChunksThatOverlapOrSpanTwoShardsAreRefused) {
  const auto twice = [](StoredTensor& t) {
    t.chunks = {{{{0, 0, 0}, {1, 1, 8}}, {}}, {{{0, 0, 7}, {1, 1, 5}}, {}}};
  };
  EXPECT_EQ(refusal({4, 6}, twice), ErrorCode::kCorrupt);
  const auto both = [](StoredTensor& t) { t.chunks = {{{{0, 0, 0}, {2, 1, 12}}, {}}}; };
  EXPECT_EQ(refusal({4, 6}, both), ErrorCode::kCorrupt);
}

}  // namespace tilestone::torch_dist::flattened_test
