#include "tilestone/base/radix_sort.h"

#include <gtest/gtest.h>

#include <random>

namespace tilestone::radix_sort_test {

struct Item {
  uint64_t key = 0;
  size_t place = 0;
  friend bool operator==(const Item&, const Item&) = default;
};

TEST(RadixSort, SortsAsAStableSortDoesForEverySizeAndWidthOfKeys) {
  std::mt19937_64 random(1);
  std::vector<Item> scratch;
  for (int round = 0; round < 500; ++round) {
    const uint64_t largest = ~uint64_t{0} >> random() % 64;
    std::vector<Item> items(random() % 1000);
    for (size_t i = 0; i < items.size(); ++i) items[i] = {random() & largest, i};
    std::vector<Item> expected = items;
    std::stable_sort(expected.begin(), expected.end(),
                     [](const Item& a, const Item& b) { return a.key < b.key; });
    radix_sort(items, scratch, largest, [](const Item& item) { return item.key; });
    ASSERT_EQ(items, expected) << "round " << round;
  }
}

}  // namespace tilestone::radix_sort_test
