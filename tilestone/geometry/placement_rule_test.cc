#include <gtest/gtest.h>

#include <algorithm>

#include "tilestone/base/error_testing.h"
#include "tilestone/geometry/placement.h"

namespace tilestone::placement_rule_test {

int find(const std::vector<std::string>& patterns, std::string_view name) {
  std::vector<PlacementRule> rules;
  for (const std::string& pattern : patterns) rules.push_back({pattern, {}});
  return find_rule(rules, name);
}

TEST(PlacementRule, WholeComponentsMatch) {
  EXPECT_EQ(find({"head"}, "head"), 0);
  EXPECT_EQ(find({"head"}, "head.weight"), 0);
  EXPECT_EQ(find({"head"}, "model.head.weight"), 0);
  EXPECT_EQ(find({"head"}, "hc_head.weight"), -1);
  EXPECT_EQ(find({"head"}, "heads.weight"), -1);
  EXPECT_EQ(find({"head.weight"}, "head.bias"), -1);
}

TEST(PlacementRule, TheHyperConnectionHeadIsNotTheHead) {
  for (const auto& rules : {std::vector<std::string>{"hc_head.*", "head"},
                            std::vector<std::string>{"head", "hc_head.*"}}) {
    const int hyper = rules[0] == "head" ? 1 : 0;
    EXPECT_EQ(find(rules, "hc_head.weight"), hyper);
    EXPECT_EQ(find(rules, "model.hc_head.scale"), hyper);
    EXPECT_EQ(find(rules, "model.hc_head.head"), hyper);
    EXPECT_EQ(find(rules, "model.head.weight"), 1 - hyper);
  }
}

TEST(PlacementRule, MoreLiteralComponentsWinThenMoreStarsThenFewerDoubleOnes) {
  for (bool reversed : {false, true}) {
    const auto expect = [&](std::vector<std::string> patterns, std::string_view name) {
      const std::string winner = patterns.front();
      if (reversed) std::reverse(patterns.begin(), patterns.end());
      EXPECT_EQ(patterns[static_cast<size_t>(find(patterns, name))], winner) << name;
    };
    expect({"experts.*.w1", "experts", "w1"}, "layer.experts.3.w1");
    expect({"layer.w1", "*.*.*"}, "layer.w1.weight");
    expect({"experts.*", "experts"}, "layer.experts.3");
    expect({"*", "**"}, "anything");
    expect({"layer.w1", "layer.**.w1"}, "layer.w1");
    expect({"layer.*.w1", "layer.**.w1"}, "layer.x.w1");
  }
}

TEST(PlacementRule, RulesThatAreEquallySpecificAreRefusedWhereBothMatch) {
  EXPECT_EQ(find({"experts", "w1", "experts.w1"}, "layer.experts.w1"), 2);
  EXPECT_EQ(find({"experts", "w1"}, "layer.experts.w2"), 0);
  const std::vector<std::vector<std::string>> ties = {
      {"experts", "w1", "layer.experts.w1"}, {"head", "head", "head"}, {"a.*.w", "a.b.*", "a.b.w"}};
  for (const auto& tie : ties) {
    EXPECT_THAT(error_of([&] { find({tie[0], "**", tie[1]}, tie[2]); }),
                IsError(ErrorCode::kInvalidArgument, "", "'" + tie[0] + "'", "'" + tie[1] + "'",
                        "'" + tie[2] + "'"));
  }
}

TEST(PlacementRule, AStarIsOneComponentAndTwoAreAnyNumber) {
  EXPECT_EQ(find({"a.*.b"}, "a.b"), -1);
  EXPECT_EQ(find({"a.*.b"}, "a.x.b"), 0);
  EXPECT_EQ(find({"a.*.b"}, "a.x.y.b"), -1);
  EXPECT_EQ(find({"a.**.b"}, "a.b"), 0);
  EXPECT_EQ(find({"a.**.b"}, "z.a.x.y.b.c"), 0);
  EXPECT_EQ(find({"a.**.b"}, "b.a"), -1);
  EXPECT_EQ(find({"a.*"}, "a"), -1);
}

TEST(PlacementRule, ManyDoubleStarsStayCheap) {
  std::string pattern = "x";
  std::string name;
  for (int i = 0; i < 60; ++i) {
    pattern += ".**.a";
    name += "a.";
  }
  EXPECT_EQ(find({pattern}, name + "a"), -1);
}

TEST(PlacementRule, NoRulesMatchNothing) { EXPECT_EQ(find({}, "head"), -1); }

}  // namespace tilestone::placement_rule_test
