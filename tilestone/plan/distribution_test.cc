#include "tilestone/plan/distribution.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <tuple>

#include "tilestone/base/error_testing.h"

namespace tilestone::distribution_test {

using Sets = std::vector<std::vector<int>>;
using Shards = std::vector<DistributedShard>;

// A direct implementation of the rule: sort, then scan all holders of each shard.
std::vector<int> by_the_book(const Shards& shards, const Sets& sets, int ranks) {
  std::vector<size_t> order(shards.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto key = [&](size_t i) {
    return std::tuple(shards[i].main_is_outside, sets[shards[i].holders].size(), ~shards[i].bytes,
                      i);
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  std::vector<uint64_t> loads(static_cast<size_t>(ranks));
  std::vector<int> given(shards.size());
  for (size_t i : order) {
    std::vector<std::pair<uint64_t, int>> candidates;
    for (int rank : sets[shards[i].holders]) {
      candidates.emplace_back(loads[static_cast<size_t>(rank)], rank);
    }
    given[i] = std::min_element(candidates.begin(), candidates.end())->second;
    loads[static_cast<size_t>(given[i])] += shards[i].bytes;
  }
  return given;
}

TEST(Distribution, FewHoldersComeFirstThenLargeShardsThenIds) {
  const Sets sets = {{0, 1, 2}, {2, 1}, {0}};
  // By number of holders: the 3 (to rank 0), the 2 (to rank 1, the lowest), then, with three
  // holders, the 9 before the 5s.
  const Shards shards = {{5, 0}, {5, 0}, {7, 1}, {8, 2}, {9, 0}};
  EXPECT_EQ(distribute_shards(shards, sets, 3), (std::vector<int>{1, 0, 1, 0, 2}));
}

TEST(Distribution, ShardsWithTheirMainReplicaOutsideComeLast) {
  const Sets sets = {{0, 1}};
  const Shards shards = {{100, 0, true}, {1, 0}, {10, 0}};
  EXPECT_EQ(distribute_shards(shards, sets, 2), (std::vector<int>{1, 1, 0}));
}

TEST(Distribution, ShardsWithoutBytesGoToTheLowestOfTheLeastLoaded) {
  const Sets sets = {{1, 0}, {1}};
  EXPECT_EQ(distribute_shards(Shards{{0, 0}, {0, 0}, {3, 1}}, sets, 2),
            (std::vector<int>{0, 0, 1}));
}

TEST(Distribution, ARankThatHoldsAShardTwiceCountsTwice) {
  const Sets sets = {{0, 0, 0}, {0, 1}};
  // Two holders come before three.
  EXPECT_EQ(distribute_shards(Shards{{5, 0}, {4, 1}}, sets, 2), (std::vector<int>{0, 0}));
  EXPECT_EQ(distribute_shards(Shards{{5, 1}, {4, 1}, {1, 0}}, sets, 2),
            (std::vector<int>{0, 1, 0}));
}

TEST(Distribution, SetsThatShareRanksSeeEachOthersLoads) {
  std::mt19937_64 random(14);
  for (int round = 0; round < 200; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 60);
    Sets sets(1 + random() % 6);
    for (auto& set : sets) {
      const size_t size = 1 + random() % 50;
      while (set.size() < size) set.push_back(static_cast<int>(random() % uint64_t(ranks)));
    }
    Shards shards(random() % 120);
    for (auto& shard : shards) {
      const uint64_t bytes = random() % 5 == 0 ? 0 : random() % (round % 2 == 0 ? 4 : 1 << 20);
      shard = {bytes, static_cast<uint32_t>(random() % sets.size()), random() % 4 == 0};
    }
    ASSERT_EQ(distribute_shards(shards, sets, ranks), by_the_book(shards, sets, ranks))
        << "round " << round;
  }
}

void expect_refused(const Shards& shards, const Sets& sets, int ranks,
                    const std::vector<std::string>& facts) {
  const Error error = error_of([&] { distribute_shards(shards, sets, ranks); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message(), MentionsAll(facts));
}

TEST(Distribution, WhatCannotBeMeantIsRefusedWithItsPlace) {
  expect_refused({{1, 0}, {1, 1}}, {{0}, {}}, 1, {"shard 1", "no rank"});
  expect_refused({{1, 3}}, {{0}}, 1, {"shard 0", "set 3", "1"});
  expect_refused({{1, 0}}, {{0, 2}}, 2, {"set 0", "rank 2", "2"});
  expect_refused({{1, 0}}, {{-1}}, 2, {"rank -1"});
  expect_refused({}, {}, -1, {"ranks", "-1"});
  expect_refused({{~uint64_t{0}, 0}, {1, 0}}, {{0}}, 1, {"bytes of a rank's shards"});
}

TEST(Distribution, NothingToGiveIsNothing) {
  EXPECT_TRUE(distribute_shards({}, {}, 0).empty());
  EXPECT_TRUE(distribute_shards(Shards{}, Sets{{}, {0}}, 1).empty());
}

}  // namespace tilestone::distribution_test
