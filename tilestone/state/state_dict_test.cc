#include "tilestone/state/state_dict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "tilestone/base/error_testing.h"

namespace tilestone::state_dict_test {

using testing::HasSubstr;

// A tree's structure as text, to compare whole trees at once.
std::string shown(const StateNode& node);

std::string shown(const StateDict& dict) {
  std::string text = "{";
  for (const auto& [key, node] : dict) {
    if (text.size() > 1) text += ", ";
    text += dotted({key}) + ": " + shown(node);
  }
  return text + "}";
}

std::string shown(const StateNode& node) {
  if (const auto* value = node.get_if<Value>()) return to_string(*value);
  if (const auto* dict = node.get_if<StateDict>()) return shown(*dict);
  if (node.get_if<LocalNonpersistent>() != nullptr) return "local";
  if (node.get_if<ShardedTensorFactory>() != nullptr) return "factory";
  std::string text = "[";
  for (const StateNode& element : *node.get_if<StateList>()) {
    if (text.size() > 1) text += ", ";
    text += shown(element);
  }
  return text + "]";
}

LocalNonpersistent local(StateNode value) {
  return {std::make_shared<const StateNode>(std::move(value))};
}

// A factory that builds {a: 1, b: 2} and merges them to the sum.
ShardedTensorFactory adder(std::string key) {
  ShardedTensorFactory factory;
  factory.key = std::move(key);
  factory.build = [](const std::string&, const TensorView&, const ReplicaId&,
                     const std::optional<FlatRange>&) -> StateNode {
    StateDict halves;
    halves["a"] = 1;
    halves["b"] = 2;
    return halves;
  };
  factory.merge = [](StateNode loaded) -> StateNode {
    const auto& halves = *loaded.get_if<StateDict>();
    return halves.find("a")->get_if<Value>()->as_int() +
           halves.find("b")->get_if<Value>()->as_int();
  };
  return factory;
}

// A tree with a factory and a local value in a dict, in a list and under an int key.
StateDict sample() {
  StateDict inner;
  inner["f"] = adder("inner.f");
  inner[int64_t{0}] = local(9);
  inner["x"] = 5;
  StateDict state;
  state["inner"] = inner;
  state["list"] = StateList{local("first"), adder("list.1"), 7, local(8)};
  state["y"] = "text";
  return state;
}

TEST(StateDict, IsPlainUntilItHoldsAFactoryOrALocalValue) {
  StateDict inner;
  inner["x"] = 5;
  StateDict state;
  state["inner"] = inner;
  state["list"] = StateList{7, StateList{"text"}, inner};
  EXPECT_TRUE(is_plain(state));
  EXPECT_TRUE(is_plain({}));
  StateDict other = state;
  other["list"] = StateList{7, StateList{local(1)}};
  EXPECT_FALSE(is_plain(other));
  inner["f"] = adder("f");
  other = state;
  other["inner"] = inner;
  EXPECT_FALSE(is_plain(other));
}

TEST(StateDict, KeepsOrderAndDistinguishesTextFromIntKeys) {
  StateDict dict;
  dict["b"] = 1;
  dict[int64_t{1}] = 2;
  dict["1"] = 3;
  dict["b"] = 4;
  EXPECT_EQ(shown(dict), "{b: 4, 1: 2, 1: 3}");
  EXPECT_EQ(dict.find(int64_t{1})->get_if<Value>()->as_int(), 2);
  EXPECT_EQ(dict.find("1")->get_if<Value>()->as_int(), 3);
  EXPECT_EQ(dict.find("c"), nullptr);
}

TEST(StateDict, LargeDictsAreFoundThroughTheirIndexAndSurviveEditing) {
  StateDict dict;
  for (int i = 0; i < 20'000; ++i) dict["k" + std::to_string(i)] = i;
  EXPECT_EQ(dict.size(), 20'000u);
  EXPECT_EQ(dict.find("k19999")->get_if<Value>()->as_int(), 19'999);
  const StateDict copy = dict;
  EXPECT_EQ(copy.find("k123")->get_if<Value>()->as_int(), 123);
  dict.entries().erase(dict.entries().begin());
  EXPECT_EQ(dict.find("k0"), nullptr);
  EXPECT_EQ(dict.find("k1")->get_if<Value>()->as_int(), 1);
  dict["k0"] = -1;
  EXPECT_EQ(dict.entries().back().second.get_if<Value>()->as_int(), -1);
  EXPECT_EQ(std::as_const(dict).find("missing"), nullptr);
}

TEST(StateDict, AtThrowsForAMissingKeyWithSimilarOnesAndInsertsNothing) {
  StateDict dict;
  dict["weight"] = 1;
  dict["bias"] = 2;
  dict[int64_t{7}] = 3;
  EXPECT_EQ(dict.at("weight").as<int>(), 1);
  EXPECT_EQ(std::as_const(dict).at(int64_t{7}).as<int>(), 3);
  const Error error = error_of([&] { dict.at("wieght"); });
  EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  EXPECT_EQ(error.key(), "wieght");
  EXPECT_THAT(error.hint(), HasSubstr("weight"));
  EXPECT_EQ(error_of([&] { std::as_const(dict).at("7"); }).code(), ErrorCode::kNotFound);
  EXPECT_EQ(dict.size(), 3u);
}

TEST(StateDict, GetGivesTypedContent) {
  float elements[2] = {1, 2};
  StateDict inner;
  inner["weight"] = TensorView::of(elements, {2});
  StateDict dict;
  dict["model"] = inner;
  dict["inside"] = Value(TensorView::of(elements, {1, 2}));
  dict["step"] = 1200;
  dict["name"] = "run";
  dict["list"] = StateList{1, 2};
  EXPECT_EQ(dict.get<int>("step"), 1200);
  EXPECT_EQ(dict.get<Value>("step"), Value(1200));
  EXPECT_EQ(dict.get<std::string>("name"), "run");
  const StateDict& same = dict;
  EXPECT_EQ(same.get<StateDict>("model").get<TensorView>("weight").elements<float>()[1], 2);
  EXPECT_EQ(same.get<TensorView>("inside").shape, Dims({1, 2}));
  dict.get<StateList>("list").emplace_back(3);
  EXPECT_EQ(dict.get<StateList>("list").size(), 3u);
}

TEST(StateDict, GetOfAnotherTypeNamesKeyAndBothTypes) {
  StateDict dict;
  dict["step"] = 1200;
  dict["model"] = StateDict();
  Error error = error_of([&] { dict.get<std::string>("step"); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error.key(), "step");
  EXPECT_THAT(error.message(), testing::AllOf(HasSubstr("kind int"), HasSubstr("string")));
  error = error_of([&] { dict.get<TensorView>("step"); });
  EXPECT_THAT(error.message(), testing::AllOf(HasSubstr("kind int"), HasSubstr("tensor")));
  error = error_of([&] { dict.get<double>("model"); });
  EXPECT_EQ(error.key(), "model");
  EXPECT_THAT(error.message(), testing::AllOf(HasSubstr("a dict"), HasSubstr("kind float")));
  EXPECT_EQ(error_of([&] { dict.get<int>("absent"); }).code(), ErrorCode::kNotFound);
}

TEST(StateDict, PathsAreJoinedByDots) {
  EXPECT_EQ(dotted({}), "");
  EXPECT_EQ(dotted({"optimizer", "state", int64_t{0}, "exp_avg"}), "optimizer.state.0.exp_avg");
}

TEST(Factories, AreReplacedByWhatTheyBuildAndMergedBack) {
  const StateDict original = sample();
  const StateDict built = build_factories(original);
  EXPECT_EQ(shown(built),
            "{inner: {f: {a: 1, b: 2}, 0: local, x: 5}, list: [local, {a: 1, b: 2}, 7, local], "
            "y: 'text'}");
  EXPECT_EQ(shown(merge_factories(built, original)),
            "{inner: {f: 3, 0: local, x: 5}, list: [local, 3, 7, local], y: 'text'}");
  EXPECT_EQ(shown(merge_factories(drop_nonpersistent(built), original)),
            "{inner: {f: 3, x: 5}, list: [3, 7], y: 'text'}");
}

TEST(Factories, ErrorsCarryTheFactorysKey) {
  const auto error_of = [](auto change) {
    ShardedTensorFactory factory = adder("mlp.fc1");
    change(factory);
    StateDict state;
    state["fc"] = factory;
    try {
      merge_factories(build_factories(state), state);
    } catch (const Error& error) {
      EXPECT_EQ(error.key(), "mlp.fc1");
      return error.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(error_of([](auto& f) {
                f.build = [](auto&&...) -> StateNode { throw std::runtime_error("odd rows"); };
              }),
              HasSubstr("odd rows"));
  EXPECT_THAT(error_of([](auto& f) {
                f.merge = [](StateNode) -> StateNode {
                  throw Error(ErrorCode::kMismatch, "halves differ");
                };
              }),
              HasSubstr("halves differ"));
  EXPECT_THAT(error_of([](auto& f) { f.build = nullptr; }), Mentions("no build function"));
  EXPECT_THAT(error_of([](auto& f) { f.merge = nullptr; }), Mentions("no merge function"));
  EXPECT_THAT(error_of([](auto& f) {
                f.build = [](auto&&...) -> StateNode { return StateList{adder("x")}; };
              }),
              HasSubstr("contains another factory"));
}

TEST(Factories, ALoadedStateOfAnotherStructureIsRefusedWithItsPath) {
  const StateDict original = sample();
  const auto error_of = [&](auto change) {
    StateDict loaded = drop_nonpersistent(build_factories(original));
    change(loaded);
    try {
      merge_factories(loaded, original);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
      return error.key() + ": " + error.message();
    }
    return std::string("no error");
  };
  EXPECT_THAT(error_of([](StateDict& s) { s["inner"] = 1; }), HasSubstr("inner: "));
  EXPECT_THAT(error_of([](StateDict& s) { s["inner"] = 1; }), HasSubstr("expected a dict"));
  EXPECT_THAT(error_of([](StateDict& s) { s["list"] = 1; }), HasSubstr("expected a list"));
  EXPECT_THAT(error_of([](StateDict& s) { s["list"] = StateList{1}; }),
              Mentions("list", "2 elements", "1"));
  EXPECT_EQ(error_of([](StateDict& s) { s.entries().erase(s.entries().begin()); }), "no error");
}

TEST(Nonpersistent, IsDroppedAndRestoredInItsPlace) {
  StateDict original = sample();
  original["gone"] = StateDict();
  original.get<StateDict>("gone")[int64_t{3}] = local(1);
  const StateDict kept = drop_nonpersistent(original);
  EXPECT_EQ(shown(kept), "{inner: {f: factory, x: 5}, list: [factory, 7], y: 'text', gone: {}}");
  EXPECT_EQ(shown(restore_nonpersistent(kept, original)),
            "{inner: {f: factory, 0: 9, x: 5}, list: ['first', factory, 7, 8], y: 'text', "
            "gone: {3: 1}}");
  StateDict without = kept;
  without.entries().pop_back();  // a dict that became empty may be absent from the loaded state
  without["extra"] = 6;
  EXPECT_EQ(shown(restore_nonpersistent(without, original)),
            "{inner: {f: factory, 0: 9, x: 5}, list: ['first', factory, 7, 8], y: 'text', "
            "gone: {3: 1}, extra: 6}");
}

TEST(Nonpersistent, AStateOfAnotherStructureIsRefused) {
  const StateDict original = sample();
  StateDict loaded = drop_nonpersistent(original);
  loaded["list"] = StateList{1, 2, 3};
  EXPECT_THROW(restore_nonpersistent(loaded, original), Error);
  loaded["list"] = 5;
  EXPECT_THROW(restore_nonpersistent(loaded, original), Error);
}

TEST(StateDict, TreesDeeperThanTheLimitAreRefused) {
  StateNode node = local(1);
  for (size_t i = 0; i < kMaxStateDepth + 1; ++i) node = StateList{std::move(node)};
  StateDict state;
  state["deep"] = std::move(node);
  for (auto* function : {&build_factories, &drop_nonpersistent}) {
    EXPECT_THAT(error_of([&] { (*function)(state); }),
                IsError(ErrorCode::kInvalidArgument, "", std::to_string(kMaxStateDepth)));
  }
}

}  // namespace tilestone::state_dict_test
