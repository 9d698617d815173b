#include <gtest/gtest.h>

#include "tilestone/geometry/placement.h"

namespace tilestone {
namespace {

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

TEST(PlacementRule, MoreLiteralComponentsWinThenTheEarlierRule) {
  EXPECT_EQ(find({"experts", "experts.*.w1", "w1"}, "layer.experts.3.w1"), 1);
  EXPECT_EQ(find({"experts", "w1"}, "layer.experts.3.w1"), 0);
  EXPECT_EQ(find({"w1", "experts"}, "layer.experts.3.w1"), 0);
  EXPECT_EQ(find({"**", "*"}, "anything"), 1);
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

}  // namespace
}  // namespace tilestone
