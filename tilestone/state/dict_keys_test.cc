#include "tilestone/state/metadata.h"

#include <gtest/gtest.h>

namespace tilestone::dict_keys_test {

TEST(DictKeys, OnlyTheDecimalFormOfAnIntIsOne) {
  EXPECT_EQ(int_of_key("7"), 7);
  EXPECT_EQ(int_of_key("-3"), -3);
  EXPECT_EQ(int_of_key("9223372036854775807"), INT64_MAX);
  for (const char* text : {"", "-", "07", "+7", "-0", "7.", "7a", " 7", "9223372036854775808"}) {
    EXPECT_EQ(int_of_key(text), std::nullopt) << text;
  }
}

TEST(DictKeys, ComeBackWhateverIsMixed) {
  StateDict dict;
  for (const PathElement& key :
       {PathElement(3), PathElement("4"), PathElement("b"), PathElement("None")}) {
    dict[key] = 1;
  }
  dict.original_keys().emplace("None", Value());
  const auto keys = keys_of(dict);
  ASSERT_TRUE(keys);
  EXPECT_FALSE(keys->ints);
  StateDict stored;
  for (const char* text : {"3", "4", "b", "None"}) stored[text] = 1;
  restore_keys(stored, *keys);
  EXPECT_NE(stored.find(3), nullptr);
  EXPECT_NE(stored.find("4"), nullptr);
  EXPECT_EQ(stored.find(4), nullptr);
  EXPECT_TRUE(stored.original_keys().at("None").is_null());
}

TEST(DictKeys, IntsAloneAreOneBitAndTextNeedsNothing) {
  StateDict ints, text, digits;
  ints[PathElement(0)] = 1;
  ints[PathElement(25)] = 1;
  ints["x"] = 1;
  text["x"] = 1;
  digits["25"] = 1;
  ASSERT_TRUE(keys_of(ints));
  EXPECT_TRUE(keys_of(ints)->ints);
  EXPECT_TRUE(keys_of(ints)->others.empty());
  EXPECT_FALSE(keys_of(text));
  ASSERT_TRUE(keys_of(digits));  // known to be text
  EXPECT_FALSE(keys_of(digits)->ints);
}

TEST(DictKeys, ADictIsEmptyOnlyIfNoItemIsAtItsPlace) {
  TreeKeys dicts;
  const Path with_items{"a"}, free{"b"}, leaf{"c"}, below_leaf{"c", "d"}, outer{"e"};
  const Path inner{"e", "f"};
  for (const Path& path : {Path(), with_items, free, leaf, below_leaf, outer, inner}) {
    dicts[path].empty = true;
  }
  dicts[{"g"}].ints = true;
  const Path item{"a", "0", "w"}, object{"c"}, other{"a-b"}, none;
  const std::vector<Path> found = empty_dicts(dicts, {&other, &none, &object, &item});
  EXPECT_EQ(found, (std::vector<Path>{inner, free}));
}

}  // namespace tilestone::dict_keys_test
