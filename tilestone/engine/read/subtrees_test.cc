// LoadOptions::subtrees (what a load reads without naming it) and LoadOptions::complete (what it
// must not leave out).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"

namespace tilestone::subtrees_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

// {"opt": {"state": {0: {"avg", "list": [tensor, {"n"}], "step"}, 1: {"avg"}}}, "opt2": tensor}
Location save_optimizer() {
  const Location location(memory_storage());
  StateDict nested, first, second, states, opt, state;
  nested["n"] = int64_t{5};
  first["avg"] = counting(DType::kFloat32, {3}, 1);
  first["list"] = StateList{StateNode(counting(DType::kInt64, {2}, 7)), StateNode(nested)};
  first["step"] = 2.5;
  second["avg"] = counting(DType::kFloat32, {3}, 4);
  states[int64_t{0}] = std::move(first);
  states[int64_t{1}] = std::move(second);
  opt["state"] = std::move(states);
  state["opt"] = std::move(opt);
  state["opt2"] = counting(DType::kFloat32, {2});
  save(state, location, {});
  return location;
}

StateDict without_state() {
  StateDict opt, wanted;
  opt["state"] = StateDict();
  wanted["opt"] = std::move(opt);
  return wanted;
}

const StateDict& dict_at(const StateDict& dict, const PathElement& key) {
  return *dict.find(key)->get_if<StateDict>();
}

TEST(Subtrees, WhatIsStoredBelowIsLoadedUnderTheKeysOfTheTree) {
  LoadOptions options;
  options.subtrees = {{"opt", "state", int64_t{0}}, {"nothing", "there"}};
  const StateDict loaded = load(without_state(), save_optimizer(), options);
  const StateDict& states = dict_at(dict_at(loaded, "opt"), "state");
  ASSERT_EQ(states.size(), 1u);
  const StateDict& first = dict_at(states, int64_t{0});
  EXPECT_EQ(elements(*first.find("avg")->get_if<TensorView>()),
            elements(counting(DType::kFloat32, {3}, 1)));
  EXPECT_EQ(first.find("step")->get_if<Value>()->as_float(), 2.5);
  const StateList& list = *first.find("list")->get_if<StateList>();
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(elements(*list[0].get_if<TensorView>()), elements(counting(DType::kInt64, {2}, 7)));
  EXPECT_EQ(list[1].get_if<StateDict>()->find("n")->get_if<Value>()->as_int(), 5);
}

TEST(Subtrees, ADictThatIsEmptyOnOneRankOnlyTakesNothingsPlace) {
  const Location location(memory_storage());
  run_ranks(2, [&](Communicator comm) {
    StateDict opt, state;
    if (comm.rank() == 0) {
      opt["x"] = StateList{StateNode(counting(DType::kInt64, {2}, 7)), StateNode(int64_t{3})};
      opt["y"] = counting(DType::kFloat32, {3}, 1);
    } else {
      opt["x"] = StateDict();
      opt["only"] = StateDict();
    }
    state["opt"] = std::move(opt);
    SaveOptions options;
    options.comm = comm;
    save(state, location, options);
  });
  LoadOptions options;
  options.subtrees = {{"opt"}};
  options.complete = {{"opt"}};
  StateDict wanted;
  wanted["opt"] = StateDict();
  const StateDict loaded = load(wanted, location, options);
  const StateDict& opt = dict_at(loaded, "opt");
  ASSERT_NE(opt.find("x")->get_if<StateList>(), nullptr);
  EXPECT_EQ(opt.find("x")->get_if<StateList>()->size(), 2u);
  EXPECT_NE(opt.find("y")->get_if<TensorView>(), nullptr);
  EXPECT_TRUE(dict_at(opt, "only").entries().empty());
}

TEST(Subtrees, ACompletePathLeavesNothingOutThatNoRankAsksFor) {
  const Location location = save_optimizer();
  // Rank r requests the state of `asked[r]`; all ranks list "opt" in `complete`.
  const auto said = [&](const std::vector<int64_t>& asked, bool objects) {
    return failures(static_cast<int>(asked.size()), [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      options.complete = {{"opt"}};
      const int64_t own = asked[static_cast<size_t>(comm.rank())];
      if (own >= 0) options.subtrees = {{"opt", "state", own}};
      if (!objects) options.complete = {{"opt", "state", int64_t{1}}};
      load(without_state(), location, options);
    });
  };
  EXPECT_THAT(said({0, 1}, true), Each(""));
  EXPECT_THAT(said({1, -1, 0}, true), Each(""));
  EXPECT_THAT(said({0, 0}, true),
              Each(AllOf(HasSubstr("key opt.state.1.avg"), HasSubstr("state_dict()"))));
  EXPECT_THAT(said({1}, true), Each(AllOf(HasSubstr("opt.state.0.avg"), HasSubstr("0.step"),
                                          testing::Not(HasSubstr("opt2")))));
  EXPECT_THAT(said({1, 1}, false), Each(""));
}

}  // namespace tilestone::subtrees_test
