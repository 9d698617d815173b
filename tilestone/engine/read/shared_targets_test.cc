// Load targets that share memory: it is an error if the checkpoint has different values for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/engine/engine_testing.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::shared_targets_test {

using Numbers = std::vector<int32_t>;
using Named = std::vector<std::pair<std::string, TensorView>>;

TensorView view_of(Numbers& memory, int64_t first, Dims shape, Dims strides) {
  return TensorView::strided(memory.data() + first, DType::kInt32, std::move(shape),
                             std::move(strides), memory.data(), 4 * memory.size());
}

TensorView flat(Numbers& memory, int64_t first, int64_t count) {
  return view_of(memory, first, {count}, {1});
}

StateDict tree_of(const Named& named) {
  StateDict state;
  for (const auto& [key, view] : named) state.entries().emplace_back(key, view);
  return state;
}

// Saves the first state and loads it into the second. Returns the error's text, or "".
std::string load_into(const Named& saved, const Named& wanted) {
  const auto storage = memory_storage();
  save(tree_of(saved), Location(storage), {});
  try {
    load(tree_of(wanted), Location(storage), {});
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
    return error.what();
  }
  return "";
}

TEST(SharedTargets, TiedTensorsLoadWhereTheCheckpointHasOneValue) {
  Numbers stored{1, 2, 3, 4}, memory(4);
  const Named saved{{"embedding", flat(stored, 0, 4)}, {"head", flat(stored, 0, 4)}};
  EXPECT_EQ(load_into(saved, {{"embedding", flat(memory, 0, 4)}, {"head", flat(memory, 0, 4)}}),
            "");
  EXPECT_EQ(memory, stored);
}

TEST(SharedTargets, TiedTensorsOfTwoValuesAreRefusedWithBothKeys) {
  Numbers stored{1, 2, 3, 4}, others{1, 2, 3, 5}, memory(4);
  const std::string said =
      load_into({{"embedding", flat(stored, 0, 4)}, {"head", flat(others, 0, 4)}},
                {{"embedding", flat(memory, 0, 4)}, {"head", flat(memory, 0, 4)}});
  EXPECT_THAT(said, testing::AllOf(testing::HasSubstr("embedding"), testing::HasSubstr("head")));
}

TEST(SharedTargets, PartsThatOverlapAreComparedWhereTheyDo) {
  Numbers stored(10), other{4, 5, 6, 7, 8}, memory(12, -1);
  std::iota(stored.begin(), stored.end(), 0);
  Named wanted{{"a", flat(memory, 0, 6)},
               {"b", flat(memory, 4, 6)},
               {"c", flat(memory, 5, 2)},
               {"d", flat(memory, 4, 5)},
               {"e", flat(memory, 10, 2)}};
  Named saved{{"a", flat(stored, 0, 6)},
              {"b", flat(stored, 4, 6)},
              {"c", flat(stored, 5, 2)},
              {"d", flat(other, 0, 5)},
              {"e", flat(stored, 0, 2)}};
  EXPECT_EQ(load_into(saved, wanted), "");
  Numbers expected = stored;
  expected.insert(expected.end(), {0, 1});
  EXPECT_EQ(memory, expected);
  other[4] = 0;  // "d" shares this element with "b", but not with "a"
  EXPECT_THAT(load_into(saved, wanted), testing::HasSubstr("\"b\""));
}

TEST(SharedTargets, StridedViewsAreComparedByElement) {
  Numbers stored{1, 2, 3, 4, 5, 6}, memory(6), whole = stored;
  const auto column = [](Numbers& of, int64_t j) { return view_of(of, j, {2}, {3}); };
  const auto turned = [](Numbers& of) { return view_of(of, 0, {3, 2}, {1, 3}); };
  const Named saved{{"w", view_of(whole, 0, {2, 3}, {3, 1})}, {"t", turned(stored)}};
  const Named wanted{{"w", view_of(memory, 0, {2, 3}, {3, 1})}, {"t", turned(memory)}};
  EXPECT_EQ(load_into(saved, wanted), "");
  EXPECT_EQ(memory, stored);
  whole[5] = 0;
  EXPECT_THAT(load_into(saved, wanted), testing::HasSubstr("\"w\""));
  // The byte ranges of the columns overlap, but the columns share no element.
  const Named columns{{"0", column(memory, 0)}, {"1", column(memory, 1)}, {"2", column(memory, 2)}};
  EXPECT_EQ(load_into({{"0", column(stored, 0)}, {"1", column(whole, 1)}, {"2", column(whole, 2)}},
                      columns),
            "");
  EXPECT_EQ(memory, whole);
  EXPECT_THAT(load_into({{"0", column(stored, 1)}, {"1", column(whole, 2)}},
                        {{"0", column(memory, 1)}, {"1", column(memory, 1)}}),
              testing::HasSubstr("\"0\""));
}

}  // namespace tilestone::shared_targets_test
