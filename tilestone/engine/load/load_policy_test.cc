// How a load treats keys that only the template or only the checkpoint has, and tensors of other
// shapes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"

namespace tilestone::load_policy_test {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using Policy = Differences::Policy;
using TwoPhase = Reading::TwoPhase;

Location save_rows(int ranks) {
  const Location location(memory_storage());
  run_ranks(ranks, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    save(row_state(comm, 5), location, options);
  });
  return location;
}

LoadOptions loading(const Communicator& comm, Policy not_in_checkpoint, Policy not_requested,
                    Policy other_shape) {
  LoadOptions options;
  options.comm = comm;
  options.differences.not_in_checkpoint = not_in_checkpoint;
  options.differences.not_requested = not_requested;
  options.differences.other_shape = other_shape;
  return options;
}

const TensorView& tensor_at(const StateDict& state, const std::string& key) {
  return *state.find(key)->get_if<TensorView>();
}

class LoadPolicy : public testing::TestWithParam<TwoPhase> {};

TEST_P(LoadPolicy, WhatIsNotInTheCheckpointKeepsTheTemplatesAndIsReportedOnEveryRank) {
  const Location location = save_rows(3);
  run_ranks(3, [&](Communicator comm) {
    LoadOptions options = loading(comm, Policy::kReport, Policy::kIgnore, Policy::kError);
    options.reading.two_phase = GetParam();
    StateDict wanted = row_template(comm), deeper;
    deeper["value"] = int64_t{77};
    deeper["tensor"] = counting(DType::kFloat32, {4}, 90);
    deeper["meta"] = TensorView::without_data(DType::kFloat32, {4});
    if (comm.rank() == 1) wanted["deeper"] = std::move(deeper);
    if (comm.rank() == 2) {
      wanted["rows"] = ShardedTensor::from_rank_offsets(
          "rows of 2", TensorView::without_data(DType::kFloat32, {1, 8}), {{0, 2, 3}});
    }
    LoadReport report;
    options.differences.report = &report;
    const StateDict loaded = load(wanted, location, options);
    EXPECT_THAT(report.not_in_checkpoint,
                ElementsAre("deeper.meta", "deeper.tensor", "deeper.value", "rows of 2"));
    EXPECT_THAT(report.not_requested, IsEmpty());
    EXPECT_EQ(elements(tensor_at(loaded, "p")), elements(counting(DType::kInt64, {3}, 5)));
    EXPECT_EQ(*loaded.find("step")->get_if<Value>(), Value(int64_t{5}));
    if (comm.rank() == 1) {
      const StateDict& kept = *loaded.find("deeper")->get_if<StateDict>();
      EXPECT_EQ(kept.find("value")->get_if<Value>()->as_int(), 77);
      EXPECT_EQ(elements(tensor_at(kept, "tensor")), elements(counting(DType::kFloat32, {4}, 90)));
      EXPECT_FALSE(tensor_at(kept, "meta").has_data());
    }
    if (comm.rank() == 2) {
      EXPECT_FALSE(loaded.find("rows")->get_if<ShardedTensor>()->data.has_data());
    }
  });
}

TEST_P(LoadPolicy, WhatNoRankRequestsIsRefusedOrReportedOnEveryRank) {
  const Location location = save_rows(2);
  const auto load_some = [&](Policy policy, bool all, LoadReport* reports) {
    return failures(2, [&](Communicator comm) {
      LoadOptions options = loading(comm, Policy::kError, policy, Policy::kError);
      options.reading.two_phase = GetParam();
      StateDict wanted;  // rank 0 wants "p", rank 1 "step" and, if all are wanted, "w"
      if (comm.rank() == 0) wanted["p"] = TensorView::without_data(DType::kInt64, {3});
      if (comm.rank() == 1) wanted["step"] = nullptr;
      if (comm.rank() == 1 && all) wanted["w"] = TensorView::without_data(DType::kFloat32, {2, 8});
      if (reports != nullptr) options.differences.report = &reports[comm.rank()];
      load(wanted, location, options);
    });
  };
  EXPECT_THAT(load_some(Policy::kError, true, nullptr), Each(""));
  EXPECT_THAT(
      load_some(Policy::kError, false, nullptr),
      Each(AllOf(HasSubstr("key not requested: w"), HasSubstr("(key w"), Not(HasSubstr("step")))));
  LoadReport reports[2];
  EXPECT_THAT(load_some(Policy::kReport, false, reports), Each(""));
  for (const LoadReport& report : reports) EXPECT_THAT(report.not_requested, ElementsAre("w"));
  EXPECT_THAT(load_some(Policy::kIgnore, false, reports), Each(""));
  for (const LoadReport& report : reports) EXPECT_EQ(report, LoadReport());
}

TEST_P(LoadPolicy, ATensorOfAnotherShapeKeepsTheTemplatesElements) {
  const Location location = save_rows(2);
  for (const Policy policy : {Policy::kReport, Policy::kIgnore, Policy::kError}) {
    const auto said = failures(2, [&](Communicator comm) {
      LoadOptions options = loading(comm, Policy::kError, Policy::kIgnore, policy);
      options.reading.two_phase = GetParam();
      StateDict wanted = row_template(comm);
      if (comm.rank() == 1) wanted["p"] = counting(DType::kInt64, {4}, 40);
      LoadReport report;
      options.differences.report = &report;
      const StateDict loaded = load(wanted, location, options);
      const bool reported = policy == Policy::kReport;
      EXPECT_EQ(report.other_shape,
                reported ? std::vector<std::string>{"p"} : std::vector<std::string>());
      const int64_t rows = comm.rank() == 1 ? 4 : 3;
      EXPECT_EQ(elements(tensor_at(loaded, "p")),
                elements(counting(DType::kInt64, {rows}, comm.rank() == 1 ? 40 : 5)));
    });
    const std::string expected = policy == Policy::kError ? "global shape" : "";
    EXPECT_THAT(said,
                Each(AllOf(HasSubstr(expected),
                           testing::ResultOf([](const std::string& text) { return text.empty(); },
                                             policy != Policy::kError))));
  }
}

INSTANTIATE_TEST_SUITE_P(, LoadPolicy,
                         testing::Values(TwoPhase::kAuto, TwoPhase::kAlways, TwoPhase::kNever));

TEST(LoadPolicies, AKeyOfAnotherKindIsAnErrorUnderEveryPolicy) {
  const Location location = save_rows(1);
  for (const Policy policy : {Policy::kError, Policy::kReport, Policy::kIgnore}) {
    EXPECT_THAT(failures(1,
                         [&](Communicator comm) {
                           StateDict wanted;
                           wanted["p"] = nullptr;
                           load(wanted, location, loading(comm, policy, policy, policy));
                         }),
                Each(HasSubstr("has a tensor under this key")));
  }
}

TEST(LoadPolicies, WhatIsLeftOutBelowACompletePathIsRefusedUnlessThePolicySaysOtherwise) {
  const Location location(memory_storage());
  StateDict state, opt;
  opt["m"] = counting(DType::kInt64, {2});
  opt["v"] = counting(DType::kInt64, {2});
  state["opt"] = std::move(opt);
  save(state, location, {});
  const auto load_a_part = [&](std::optional<Policy> policy, LoadReport* report) {
    LoadOptions options;
    options.complete = {{"opt"}};
    options.differences.not_requested = policy;
    StateDict wanted, part;
    part["m"] = counting(DType::kInt64, {2}, 9);
    wanted["opt"] = std::move(part);
    options.differences.report = report;
    return failures(1, [&](Communicator) { load(wanted, location, options); }).front();
  };
  EXPECT_THAT(load_a_part(std::nullopt, nullptr), HasSubstr("does not request: opt.v"));
  EXPECT_THAT(load_a_part(Policy::kError, nullptr), HasSubstr("opt.v"));
  LoadReport report;
  EXPECT_EQ(load_a_part(Policy::kReport, &report), "");
  EXPECT_THAT(report.not_requested, ElementsAre("opt.v"));
  EXPECT_EQ(load_a_part(Policy::kIgnore, &report), "");
  EXPECT_THAT(report.not_requested, ElementsAre("opt.v"));
}

TEST(LoadPolicies, WhatATemplateLeavesOutOfItsDictsIsListedAndWarnedOfOnce) {
  const Location location(memory_storage());
  StateDict model, state;
  for (const char* name : {"a", "b", "c", "d"}) model[name] = counting(DType::kInt64, {2});
  state["model"] = std::move(model);
  state["step"] = int64_t{3};
  save(state, location, {});
  std::mutex mutex;
  for (const std::optional<Policy> policy : {std::optional<Policy>(), {Policy::kIgnore}}) {
    std::vector<std::string> said;
    set_log_sink([&](LogLevel level, std::string_view text) {
      const std::lock_guard lock(mutex);
      if (level == LogLevel::kWarning) said.emplace_back(text);
    });
    run_ranks(2, [&](Communicator comm) {
      LoadOptions options;
      options.comm = comm;
      options.differences.not_requested = policy;
      LoadReport report;
      options.differences.report = &report;
      StateDict own, wanted;
      own[comm.rank() == 0 ? "a" : "c"] = counting(DType::kInt64, {2});
      wanted["model"] = std::move(own);
      load(wanted, location, options);
      EXPECT_THAT(report.not_requested, ElementsAre("model.b", "model.d"));
    });
    set_log_sink(nullptr);
    if (policy) {
      EXPECT_THAT(said, IsEmpty());
    } else {
      EXPECT_THAT(said, ElementsAre(AllOf(HasSubstr("2 keys of the checkpoint (32 B) left out"),
                                          HasSubstr("model.b, model.d"))));
    }
  }
}

// A factory that builds its one tensor under the key "part" and merges back to it.
ShardedTensorFactory factory_of(TensorView data) {
  ShardedTensorFactory factory;
  factory.key = "f";
  factory.data = std::move(data);
  factory.build = [](const std::string&, const TensorView& view, const ReplicaId&,
                     const std::optional<FlatRange>&) -> StateNode {
    StateDict parts;
    parts["part"] = ShardedTensor::from_box("part", view, {2}, Box::whole({2}));
    return parts;
  };
  factory.merge = [](StateNode loaded) -> StateNode {
    return loaded.get_if<StateDict>()->find("part")->get_if<ShardedTensor>()->data;
  };
  return factory;
}

TEST(LoadPolicies, APartOfAFactoryKeepsTheTemplatesElementsAndIsRefusedWhereThereAreNone) {
  const Location location = save_rows(1);
  const auto load_factory = [&](TensorView data) {
    StateDict wanted;
    wanted["f"] = factory_of(std::move(data));
    return load(wanted, location, loading({}, Policy::kIgnore, Policy::kIgnore, Policy::kError));
  };
  const StateDict loaded = load_factory(counting(DType::kInt64, {2}, 40));
  EXPECT_EQ(elements(tensor_at(loaded, "f")), elements(counting(DType::kInt64, {2}, 40)));
  EXPECT_THAT(
      failures(1,
               [&](Communicator) { load_factory(TensorView::without_data(DType::kInt64, {2})); }),
      Each(AllOf(HasSubstr("the factory f"), HasSubstr("key part"))));
}

TEST(LoadPolicies, RanksThatDifferInAPolicyAreNamed) {
  const Location location = save_rows(2);
  EXPECT_THAT(
      failures(2,
               [&](Communicator comm) {
                 const Policy own = comm.rank() == 1 ? Policy::kIgnore : Policy::kReport;
                 load(row_template(comm), location,
                      loading(comm, own, Policy::kIgnore, Policy::kError));
               }),
      Each(HasSubstr("the ranks don't agree on differences.not_in_checkpoint (rank 0: \"report\"; "
                     "rank 1: \"ignore\")")));
}

}  // namespace tilestone::load_policy_test
