#include "tilestone/state/content_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tilestone::content_parts_test {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<std::string> differing(const Value& a, const Value& b) {
  std::vector<std::string> paths;
  for (const ContentDifference& found : find_differences(content_parts(a), content_parts(b))) {
    paths.push_back(found.path + ": " + found.a + " | " + found.b);
  }
  return paths;
}

Value object(Value::Dict state, std::string name = "Namespace") {
  Opaque opaque;
  opaque.kind = Opaque::Kind::kCall;
  opaque.module = "argparse";
  opaque.name = std::move(name);
  opaque.state = Value::dict(std::move(state));
  opaque.has_state = true;
  return Value(std::move(opaque));
}

TEST(ContentParts, NameLeavesOfDictsListsTuplesAndObjects) {
  const auto value = [](int lr, int step) {
    return Value::dict({{"args", object({{"lr", lr}, {"betas", Value::tuple({1, 2})}})},
                        {3, Value::list({Value::dict({{"step", step}}), 7})}});
  };
  EXPECT_THAT(differing(value(1, 5), value(1, 5)), IsEmpty());
  EXPECT_THAT(differing(value(1, 5), value(2, 6)),
              ElementsAre("args.lr: 1 | 2", "3.0.step: 5 | 6"));
}

TEST(ContentParts, NameWhatOneLacksWithoutWhatIsBelow) {
  const Value whole = Value::dict({{"a", Value::dict({{"b", 1}, {"c", 2}})}, {"ab", 1}});
  EXPECT_THAT(differing(whole, Value::dict({{"ab", 1}})),
              ElementsAre("a: {'b': 1, 'c': 2} | nothing"));
  EXPECT_THAT(differing(Value::dict({}), whole),
              ElementsAre("a: nothing | {'b': 1, 'c': 2}", "ab: nothing | 1"));
}

TEST(ContentParts, ADictsOrderIsNoPartAndAnOrderedDictsIs) {
  const Value::Dict one = {{"a", 1}, {"b", 2}}, other = {{"b", 2}, {"a", 1}};
  EXPECT_THAT(differing(Value::dict(one), Value::dict(other)), IsEmpty());
  EXPECT_EQ(differing(Value::ordered_dict(one), Value::ordered_dict(other)).size(), 1u);
  EXPECT_EQ(differing(Value::dict(one), Value::ordered_dict(one)).size(), 1u);
}

TEST(ContentParts, KindsClassesAttributesAndKeysWithDotsAreParts) {
  EXPECT_EQ(differing(Value::list({1}), Value::tuple({1})).size(), 1u);
  EXPECT_EQ(differing(object({}), object({}, "Other")).size(), 1u);
  EXPECT_EQ(differing(Value::ordered_dict({}, Value::dict({{"version", 1}})),
                      Value::ordered_dict({}, Value::dict({{"version", 2}})))
                .size(),
            1u);
  const auto alike = [](int number) {
    return Value::dict({{"a.b", 1}, {"a", Value::dict({{"b", number}})}});
  };
  EXPECT_THAT(differing(alike(1), alike(2)), ElementsAre("a.b: 1 | 2"));
}

TEST(ContentParts, BeyondTheMostWhatIsLeftIsOneLeaf) {
  Value::List items;
  for (int i = 0; i < 100; ++i) items.push_back(Value::list({i}));
  const auto parts = content_parts(Value::list(items), 10);
  EXPECT_LE(parts.size(), 110u);
  items.back() = Value::list({7});
  EXPECT_EQ(find_differences(parts, content_parts(Value::list(items), 10)).size(), 1u);
}

}  // namespace tilestone::content_parts_test
