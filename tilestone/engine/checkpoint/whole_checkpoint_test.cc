// Loads of a whole checkpoint, without a template.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/known/known.h"

namespace tilestone::whole_checkpoint_test {

using testing::Each;
using testing::HasSubstr;

const StateNode& at(const StateNode& node, const PathElement& element) {
  if (const auto* list = node.get_if<StateList>()) {
    return list->at(static_cast<size_t>(std::get<int64_t>(element)));
  }
  return *node.get_if<StateDict>()->find(element);
}

void expect_counting(const StateNode& node, DType dtype, const Dims& shape, int64_t first) {
  const auto* tensor = node.get_if<TensorView>();
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(elements(*tensor), elements(counting(dtype, shape, first)));
}

class LoadAll : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Formats, LoadAll, testing::Values("torch_dist", "zarr"),
                         [](const auto& format) { return format.param; });

TEST_P(LoadAll, GivesEachRankTheTreeAsItWasSaved) {
  const Location location(memory_storage());
  run_ranks(2, [&](Communicator comm) {
    StateDict state = row_state(comm, 5), group, deeper;
    deeper["n"] = int64_t{4};
    group["layers"] = StateList{StateNode(counting(DType::kInt64, {2}, 7)), StateNode(deeper)};
    group["7"] = 1.5;
    state["group"] = std::move(group);
    state["renamed"] = ShardedTensor::from_rank_offsets(
        "its.own.key", counting(DType::kInt32, {2}, 2 * comm.rank()), {{0, comm.rank(), 2}});
    SaveOptions options;
    options.comm = comm;
    options.format = format_named(GetParam());
    save(state, location, options);
  });
  for (const auto two_phase : {Reading::TwoPhase::kNever, Reading::TwoPhase::kAlways}) {
    run_ranks(3, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      options.reading.two_phase = two_phase;
      const StateNode loaded = load(std::nullopt, location, options);
      EXPECT_EQ(loaded.get_if<StateDict>()->size(), 5u);
      expect_counting(at(loaded, "w"), DType::kFloat32, {2, 8}, 5);
      expect_counting(at(loaded, "p"), DType::kInt64, {3}, 5);
      expect_counting(at(loaded, "its.own.key"), DType::kInt32, {4}, 0);
      const StateNode& group = at(loaded, "group");
      expect_counting(at(at(group, "layers"), int64_t{0}), DType::kInt64, {2}, 7);
      EXPECT_EQ(at(at(at(group, "layers"), int64_t{1}), "n").get_if<Value>()->as_int(), 4);
      EXPECT_EQ(at(group, "7").get_if<Value>()->as_float(), 1.5);
    });
  }
}

TEST(LoadWithoutTemplate, ARankWithoutLayersHasAnEmptyList) {
  const Location location(memory_storage());
  run_ranks(2, [&](Communicator comm) {
    StateDict state;
    StateList layers;
    if (comm.rank() == 1) {
      layers.emplace_back(ShardedTensor::from_box("layers.0", counting(DType::kInt64, {2}, 7), {2},
                                                  Box::whole({2})));
    }
    state["layers"] = std::move(layers);
    SaveOptions options;
    options.comm = comm;
    save(state, location, options);
  });
  expect_counting(at(at(load(std::nullopt, location), "layers"), int64_t{0}), DType::kInt64, {2},
                  7);
}

TEST(LoadWithoutTemplate, TwoItemsInOnePlaceAreRefusedByKey) {
  const Location location(memory_storage());
  StateDict state, inner;
  inner["b"] = counting(DType::kInt64, {2});
  state["a"] = std::move(inner);
  state["x"] = ShardedTensor::from_box("a", counting(DType::kInt64, {2}), {2}, Box::whole({2}));
  save(state, location, {});
  EXPECT_THAT(failures(1, [&](Communicator) { load(std::nullopt, location); }),
              Each(HasSubstr("have one place in its tree")));
}

}  // namespace tilestone::whole_checkpoint_test
