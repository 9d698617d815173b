#include "tilestone/plan/load_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>

#include "tilestone/base/error_testing.h"

namespace tilestone::load_plan_test {

using testing::HasSubstr;
using testing::Not;

TensorItem wanted(std::string key, Dims shape, std::vector<Box> boxes) {
  TensorItem item;
  item.key = std::move(key);
  item.global_shape = std::move(shape);
  for (Box& box : boxes) item.pieces.push_back({std::move(box), TensorView()});
  return item;
}

StoredTensor stored(std::string key, Dims shape, std::vector<std::pair<Box, uint32_t>> chunks) {
  StoredTensor tensor;
  tensor.key = std::move(key);
  tensor.shape = std::move(shape);
  uint64_t offset = 1'000'000;
  for (auto& [box, file] : chunks) {
    tensor.chunks.push_back({std::move(box), {file, Codec::kNone, offset, 100, {}}});
    offset -= 100;
  }
  return tensor;
}

Metadata metadata_of(std::vector<StoredTensor> tensors) {
  Metadata metadata;
  metadata.files = {"f0", "f1", "f2", "f3"};
  metadata.tensors = std::move(tensors);
  metadata.index();
  return metadata;
}

std::string shown(const LoadPlan& plan) {
  std::string text;
  for (const ChunkRead& read : plan.reads) {
    text += std::to_string(read.item) + "." + std::to_string(read.piece) + " <- " +
            std::to_string(read.chunk) + " " + to_string(read.box) + "; ";
  }
  for (const auto& fill : plan.fills) {
    text += std::to_string(fill.item) + "." + std::to_string(fill.piece) + " <- 0 " +
            to_string(fill.box) + "; ";
  }
  return text;
}

Error load_error(const TensorItem& item, const Metadata& metadata) {
  return error_of([&] { plan_load({&item, 1}, metadata); });
}

TEST(LoadPlan, ReadsExactlyTheCommonBoxesInFileOrder) {
  const Metadata metadata = metadata_of(
      {stored("w", {4, 4}, {{{{0, 0}, {2, 4}}, 1}, {{{2, 0}, {2, 2}}, 0}, {{{2, 2}, {2, 2}}, 0}})});
  const std::vector<TensorItem> items = {wanted("w", {4, 4}, {{{1, 1}, {2, 2}}, {{0, 0}, {1, 1}}})};
  EXPECT_EQ(shown(plan_load(items, metadata)),
            "0.0 <- 2 [2:3, 2:3]; 0.0 <- 1 [2:3, 1:2]; 0.0 <- 0 [1:2, 1:3]; 0.1 <- 0 [0:1, 0:1]; ");
}

TEST(LoadPlan, ScalarsAndTensorsWithoutElements) {
  const Metadata metadata =
      metadata_of({stored("one", {}, {{{{}, {}}, 0}}), stored("none", {0, 4}, {}),
                   stored("null", {0}, {{{{0}, {0}}, 0}})});
  const std::vector<TensorItem> items = {wanted("none", {0, 4}, {{{0, 0}, {0, 4}}}),
                                         wanted("one", {}, {{{}, {}}}),
                                         wanted("null", {0}, {{{0}, {0}}})};
  EXPECT_EQ(shown(plan_load(items, metadata)), "1.0 <- 0 []; ");
}

TEST(LoadPlan, ReplicasAreReadOnceFromTheFirstFile) {
  const Metadata metadata =
      metadata_of({stored("w", {4}, {{{{0}, {4}}, 1}, {{{0}, {4}}, 2}, {{{0}, {4}}, 0}})});
  const std::vector<TensorItem> items = {wanted("w", {4}, {{{1}, {2}}})};
  EXPECT_EQ(shown(plan_load(items, metadata)), "0.0 <- 2 [1:3]; ");
}

TEST(LoadPlan, OverlappingChunksGiveEachElementOnceLargestFirst) {
  const Metadata metadata =
      metadata_of({stored("w", {10}, {{{{0}, {4}}, 0}, {{{3}, {7}}, 1}, {{{2}, {3}}, 2}})});
  const std::vector<TensorItem> items = {wanted("w", {10}, {{{0}, {10}}})};
  EXPECT_EQ(shown(plan_load(items, metadata)), "0.0 <- 0 [0:3]; 0.0 <- 1 [3:10]; ");
}

TEST(LoadPlan, OtherShapesAreReadWhereTheyMeetAndZeroFilled) {
  const Metadata metadata = metadata_of({stored("w", {4, 6}, {{{{0, 0}, {4, 6}}, 0}})});
  TensorItem item = wanted("w", {6, 5}, {{{0, 0}, {3, 5}}, {{3, 0}, {3, 5}}});
  item.allow_shape_mismatch = true;
  EXPECT_EQ(shown(plan_load({&item, 1}, metadata)),
            "0.0 <- 0 [0:3, 0:5]; 0.1 <- 0 [3:4, 0:5]; 0.1 <- 0 [4:6, 0:5]; ");
  item.global_shape = {30};
  item.pieces.clear();
  EXPECT_EQ(load_error(item, metadata).code(), ErrorCode::kMismatch);
}

TEST(LoadPlan, KeysThatAreNotThereComeWithAHint) {
  Metadata metadata = metadata_of({stored("model.weight", {4}, {}), stored("model.bias", {4}, {})});
  metadata.objects.push_back({"rng", {}, {}});
  Error error = load_error(wanted("model.weigth", {4}, {}), metadata);
  EXPECT_THAT(error, IsError(ErrorCode::kNotFound, "model.weigth", "tensor"));
  EXPECT_THAT(error.hint(), Mentions("\"model.weight\""));
  EXPECT_THAT(error.hint(), Not(HasSubstr("bias")));
  error = load_error(wanted("rng", {4}, {}), metadata);
  EXPECT_THAT(error, IsError(ErrorCode::kNotFound, "rng", "tensor"));
  EXPECT_THAT(error.hint(), Mentions("object"));
  error = load_error(wanted("something else", {4}, {}), metadata);
  EXPECT_THAT(error, IsError(ErrorCode::kNotFound, "something else", "tensor"));
  EXPECT_THAT(error.hint(), Mentions("no similar key"));
  EXPECT_THAT(error.hint(), HasSubstr("differences.not_in_checkpoint = kReport loads the others"));
}

TEST(LoadPlan, DtypesWithoutAConversionAreRefusedByKeyWithOrWithoutCast) {
  Metadata metadata = metadata_of({stored("w", {4}, {{{{0}, {4}}, 0}})});
  metadata.tensors[0].dtype = DType::kComplex64;
  const TensorItem item = wanted("w", {4}, {{{0}, {4}}});
  Error error = load_error(item, metadata);
  EXPECT_EQ(error.code(), ErrorCode::kMismatch);
  EXPECT_EQ(error.hint(), "");
  try {
    plan_load({&item, 1}, metadata, {.cast = true});
    FAIL();
  } catch (const Error& refused) {
    EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(refused.key(), "w");
    EXPECT_THAT(refused.message(), HasSubstr("no conversion"));
  }
}

TEST(LoadPlan, OtherDtypesAndShapesAreRefusedUnlessAskedFor) {
  const Metadata metadata = metadata_of({stored("w", {4}, {{{{0}, {4}}, 0}})});
  TensorItem item = wanted("w", {4}, {{{0}, {4}}});
  item.dtype = DType::kBFloat16;
  Error error = load_error(item, metadata);
  EXPECT_THAT(error, IsError(ErrorCode::kMismatch, "w", "checkpoint", "float32 [4]", "bfloat16 [4]",
                             "wanted"));
  EXPECT_THAT(error.hint(), HasSubstr("cast"));
  EXPECT_EQ(plan_load({&item, 1}, metadata, {.cast = true}).reads.size(), 1u);

  error = load_error(wanted("w", {5}, {{{0}, {5}}}), metadata);
  EXPECT_THAT(error, IsError(ErrorCode::kMismatch, "w", "checkpoint", "[4]", "[5]", "wanted"));
  EXPECT_THAT(error.hint(), HasSubstr("allow_shape_mismatch"));
}

TEST(LoadPlan, WhatIsNotStoredIsNamed) {
  const Metadata metadata =
      metadata_of({stored("w", {4, 4}, {{{{0, 0}, {4, 2}}, 0}, {{{0, 2}, {3, 2}}, 0}})});
  const Error error = load_error(wanted("w", {4, 4}, {{{2, 0}, {2, 4}}}), metadata);
  EXPECT_THAT(error, IsError(ErrorCode::kCoverage, "w", "[3:4, 2:4]", "[2:4, 0:4]"));
  const TensorItem held = wanted("w", {4, 4}, {{{2, 0}, {1, 4}}});
  EXPECT_EQ(plan_load({&held, 1}, metadata).reads.size(), 2u);
}

TEST(LoadPlan, BoxesOutsideTheirTensorsAreRefused) {
  const Metadata metadata = metadata_of({stored("w", {4}, {{{{0}, {4}}, 0}})});
  Error error = load_error(wanted("w", {4}, {{{3}, {2}}}), metadata);
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error.key(), "w");
  const Metadata damaged = metadata_of({stored("w", {4}, {{{{0}, {5}}, 0}})});
  error = load_error(wanted("w", {4}, {{{0}, {4}}}), damaged);
  EXPECT_THAT(error, IsError(ErrorCode::kCorrupt, "w", "checkpoint", "[0]", "[5]", "[4]"));
}

Box random_box(std::mt19937_64& random, const Dims& shape) {
  Box box = Box::whole(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    box.offset[d] = static_cast<int64_t>(random() % static_cast<uint64_t>(shape[d] + 1));
    box.shape[d] =
        static_cast<int64_t>(random() % static_cast<uint64_t>(shape[d] - box.offset[d] + 1));
  }
  return box;
}

bool holds(const Box& box, const Dims& at) {
  Box element{at, Dims(at.size(), 1)};
  return box.contains(element);
}

// Random overlapping chunks. Every element of a wanted piece is read exactly once, from a chunk
// that contains it, or the plan fails and names a real hole.
TEST(LoadPlanProperty, EveryWantedElementIsReadOnceFromAChunkThatHoldsIt) {
  int refused = 0;
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const Dims shape{1 + static_cast<int64_t>(random() % 9),
                     1 + static_cast<int64_t>(random() % 9)};
    std::vector<std::pair<Box, uint32_t>> chunks;
    const uint64_t count = seed % 2 == 0 ? 3 + random() % 5 : 150;
    for (uint64_t c = 0; c < count; ++c)
      chunks.emplace_back(random_box(random, shape), random() % 4);
    if (seed % 5 != 0) chunks.emplace_back(Box{{0, 0}, {shape[0], (shape[1] + 1) / 2}}, 3u);
    if (seed % 5 != 0)
      chunks.emplace_back(Box{{0, shape[1] / 2}, {shape[0], shape[1] - shape[1] / 2}}, 3u);
    const Metadata metadata = metadata_of({stored("w", shape, chunks)});
    std::vector<Box> boxes;
    for (int p = 0; p < 5; ++p) boxes.push_back(random_box(random, shape));
    const TensorItem item = wanted("w", shape, boxes);
    std::optional<Error> error;
    try {
      const LoadPlan plan = plan_load({&item, 1}, metadata);
      for (uint32_t p = 0; p < boxes.size(); ++p) {
        int64_t volume = 0;
        for (const ChunkRead& read : plan.reads) {
          if (read.piece != p) continue;
          volume += read.box.numel();
          ASSERT_FALSE(read.box.empty());
          ASSERT_TRUE(boxes[p].contains(read.box));
          ASSERT_TRUE(chunks[read.chunk].first.contains(read.box));
          for (const ChunkRead& other : plan.reads) {
            if (&other == &read || other.piece != p) continue;
            ASSERT_FALSE(intersects(read.box, other.box));
          }
        }
        ASSERT_EQ(volume, boxes[p].numel());
      }
    } catch (const Error& thrown) {
      error = thrown;
    }
    if (!error) continue;
    ++refused;
    ASSERT_EQ(error->code(), ErrorCode::kCoverage);
    bool hole = false;  // a wanted element is in no chunk
    for (const Box& box : boxes) {
      for (int64_t i = 0; i < box.numel(); ++i) {
        const Dims at{box.offset[0] + i / box.shape[1], box.offset[1] + i % box.shape[1]};
        hole = hole || std::none_of(chunks.begin(), chunks.end(),
                                    [&](const auto& chunk) { return holds(chunk.first, at); });
      }
    }
    ASSERT_TRUE(hole) << error->what();
  }
  EXPECT_GT(refused, 10);
  EXPECT_LT(refused, 500);
}

}  // namespace tilestone::load_plan_test
