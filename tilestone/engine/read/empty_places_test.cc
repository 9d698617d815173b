// Empty dicts and lists of a template, and dicts and lists that meet objects.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/comm/communicator.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"

namespace tilestone::empty_places_test {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using Policy = Differences::Policy;

StateDict of(const std::string& key, StateNode node) {
  StateDict dict;
  dict[key] = std::move(node);
  return dict;
}

// {"state": {0: {"avg", "step"}, 1: {"deep": {}}}, "list": [tensor, {"n"}]}
StateDict content(int64_t factor) {
  StateDict first, states, out;
  first["avg"] = counting(DType::kFloat32, {3}, factor);
  first["step"] = 2.5;
  states[int64_t{0}] = std::move(first);
  states[int64_t{1}] = of("deep", StateDict());
  out["state"] = std::move(states);
  out["list"] =
      StateList{StateNode(counting(DType::kInt64, {2}, 7)), StateNode(of("n", int64_t{5}))};
  return out;
}

Location save_whole() {
  const Location location(memory_storage());
  save(content(1), location, {});
  return location;
}

StateDict empty_template() {
  StateDict wanted;
  wanted["state"] = StateDict();
  wanted["list"] = Value::list({});
  return wanted;
}

void expect_content(const StateDict& loaded) {
  const StateDict& states = loaded.get<StateDict>("state");
  const StateDict& first = states.get<StateDict>(int64_t{0});
  EXPECT_EQ(elements(first.get<TensorView>("avg")), elements(counting(DType::kFloat32, {3}, 1)));
  EXPECT_EQ(first.get<double>("step"), 2.5);
  EXPECT_TRUE(states.get<StateDict>(int64_t{1}).get<StateDict>("deep").empty());
  const StateList& list = loaded.get<StateList>("list");
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(elements(list[0].as<TensorView>()), elements(counting(DType::kInt64, {2}, 7)));
  EXPECT_EQ(list[1].as<StateDict>().get<int64_t>("n"), 5);
}

TEST(EmptyPlaces, AnEmptyDictOrListAsksForWhatIsStoredThere) {
  const Location location = save_whole();
  expect_content(load(empty_template(), location, {}));
  StateDict with_list = empty_template();
  with_list["list"] = StateList();
  expect_content(load(with_list, location, {}));
  run_ranks(3, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    expect_content(load(empty_template(), location, options));
  });
  EXPECT_TRUE(load(StateDict(), location, {}).empty());  // the root names nothing
  LoadOptions as_they_are;
  as_they_are.fill_empty = false;
  EXPECT_TRUE(
      load(of("state", StateDict()), location, as_they_are).get<StateDict>("state").empty());
}

TEST(EmptyPlaces, WhatIsEmptyOnSomeRanksOnlyStaysEmptyThere) {
  const Location location = save_whole();
  run_ranks(2, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    StateDict wanted = empty_template();
    if (comm.rank() == 0) {
      wanted["state"] = of("0", of("step", nullptr));
    }
    const StateDict loaded = load(wanted, location, options);
    EXPECT_EQ(loaded.get<StateDict>("state").size(), comm.rank() == 0 ? 1u : 0u);
    EXPECT_EQ(loaded.get<StateList>("list").size(), 2u);
  });
}

// {"optim": {"avg": a tensor of [2 * ranks, 4] in rows, "step"}}
Location save_sharded(int ranks) {
  const Location location(memory_storage());
  run_ranks(ranks, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    StateDict optim;
    optim["avg"] = ShardedTensor::from_rank_offsets(
        "optim.avg", counting(DType::kFloat32, {2, 4}, comm.rank() + 1),
        {{{0, comm.rank(), comm.size()}}});
    optim["step"] = int64_t{9};
    save(of("optim", std::move(optim)), location, options);
  });
  return location;
}

TEST(EmptyPlaces, ArraysThatAreShardedOverRanksAreAnErrorUnlessOneRankLoads) {
  const Location location = save_sharded(2);
  const StateDict wanted = of("optim", StateDict());
  const StateDict alone = load(wanted, location, {});
  EXPECT_EQ(alone.get<StateDict>("optim").get<TensorView>("avg").shape, (Dims{4, 4}));
  const auto said = [&](std::optional<Policy> policy, LoadReport* report) {
    return failures(2, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      options.differences.not_requested = policy;
      if (comm.rank() == 0) options.differences.report = report;
      EXPECT_TRUE(load(wanted, location, options).get<StateDict>("optim").empty());
    });
  };
  EXPECT_THAT(said(std::nullopt, nullptr),
              Each(AllOf(HasSubstr("nothing yet at optim"), HasSubstr("key optim.avg"),
                         HasSubstr("create the state before the load"))));
  LoadReport report;
  EXPECT_THAT(said(Policy::kIgnore, &report), Each(""));
  EXPECT_THAT(report.not_requested, ElementsAre("optim.avg", "optim.step"));
}

TEST(EmptyPlaces, AnArrayOfTheShapeOfAShardedTensorOfTheTemplateIsNotTakenForAWholeOne) {
  const Location location = save_sharded(1);
  StateDict wanted = of("optim", StateDict());
  wanted["w"] = ShardedTensor::from_rank_offsets(
      "optim.avg", TensorView::without_data(DType::kFloat32, {1, 4}), {{{0, 0, 2}}});
  EXPECT_THAT(failures(1, [&](Communicator) { load(wanted, location, {}); }),
              Each(HasSubstr("nothing yet at optim")));
}

TEST(EmptyPlaces, ADictThatMeetsALeafIsAnErrorUnlessADictIsStored) {
  const Location location(memory_storage());
  StateDict state;
  state["text"] = "leaf";
  state["tensor"] = counting(DType::kInt64, {2});
  state["tuple"] = Value::tuple({Value(1), Value(2)});
  save(state, location, {});
  const auto said = [&](const std::string& key, StateNode node) {
    const StateDict wanted = of(key, std::move(node));
    return failures(2, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      load(wanted, location, options);
    });
  };
  const auto names = HasSubstr("has a dict under this key, and the checkpoint a string");
  EXPECT_THAT(said("text", of("k", int64_t{1})), Each(AllOf(names, HasSubstr("key text"))));
  EXPECT_THAT(said("text", StateDict()), Each(names));
  EXPECT_THAT(said("text", StateList{StateNode(of("k", int64_t{1}))}),
              Each(HasSubstr("has a list")));
  EXPECT_THAT(said("tensor", StateDict()), Each(HasSubstr("and the checkpoint a tensor")));
  const StateNode tensors = StateList{StateNode(counting(DType::kInt64, {1}))};
  EXPECT_THAT(said("tuple", tensors), Each(""));
}

}  // namespace tilestone::empty_places_test
