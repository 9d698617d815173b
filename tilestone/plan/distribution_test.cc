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

std::vector<uint64_t> loads_of(const std::vector<int>& given, const Shards& shards, int ranks) {
  std::vector<uint64_t> loads(static_cast<size_t>(ranks));
  for (size_t i = 0; i < given.size(); ++i) {
    loads[static_cast<size_t>(given[i])] += shards[i].bytes;
  }
  return loads;
}

TEST(DistributionByFile, AFileGoesToItsWriterEvenWhereThatIsNotBalanced) {
  const Sets sets = {{0, 1, 2}};
  const Shards shards = {{90, 0}, {10, 0}, {10, 0}, {90, 0}};
  const std::vector<uint32_t> file_of = {0, 1, 2, 0};
  EXPECT_EQ(distribute_shards_by_file(shards, sets, 3, file_of, std::vector<int>{2, 0, 1}),
            (std::vector<int>{2, 0, 1, 2}));
}

TEST(DistributionByFile, AWriterThatDoesNotHoldAShardDoesNotGetIt) {
  const Sets sets = {{1, 2}};
  EXPECT_EQ(distribute_shards_by_file(Shards{{8, 0}}, sets, 3, std::vector<uint32_t>{0},
                                      std::vector<int>{0}),
            (std::vector<int>{1}));
}

TEST(DistributionByFile, AFileWithoutAWriterHasAsFewReadersAsBalanceAllows) {
  const Sets sets = {{0, 1}};
  // Two files that other ranks wrote: each file goes to one rank.
  const Shards shards(20, DistributedShard{10, 0});
  std::vector<uint32_t> file_of(20);
  for (size_t i = 0; i < 20; ++i) file_of[i] = i % 2;
  const std::vector<int> nobody = {-1, -1};
  auto given = distribute_shards_by_file(shards, sets, 2, file_of, nobody);
  for (size_t i = 0; i < 20; ++i) EXPECT_EQ(given[i], static_cast<int>(i % 2)) << i;
  // All in one file: the first reader stops at 1.25 times the mean.
  given = distribute_shards_by_file(shards, sets, 2, std::vector<uint32_t>(20), nobody);
  EXPECT_EQ(loads_of(given, shards, 2), (std::vector<uint64_t>{120, 80}));
  EXPECT_EQ(std::count(given.begin(), given.begin() + 12, 0), 12);
}

TEST(DistributionByFile, WithoutFilesItIsBalancedAsWithoutThem) {
  const Sets sets = {{0, 1, 2}, {1, 2}};
  const Shards shards = {{5, 0}, {9, 0}, {4, 1}, {1, 0}, {7, 0, true}};
  EXPECT_EQ(distribute_shards_by_file(shards, sets, 3, std::vector<uint32_t>(5, kNoFile), {}),
            distribute_shards(shards, sets, 3));
}

TEST(DistributionByFile, NoRankExceedsTheLimitButForItsOwnFileOrALargeShard) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 100; ++round) {
    const int ranks = 2 + static_cast<int>(random() % 14);
    Sets sets(1);
    for (int rank = 0; rank < ranks; ++rank) sets[0].push_back(rank);
    std::vector<int> writers(1 + random() % 30);
    for (int& writer : writers) writer = static_cast<int>(random() % uint64_t(ranks + 5));
    for (int& writer : writers) writer = writer < ranks ? writer : -1;
    Shards shards(400);
    std::vector<uint32_t> file_of;
    std::vector<uint64_t> own(static_cast<size_t>(ranks));
    for (auto& shard : shards) {
      shard = {random() % 1000, 0};
      file_of.push_back(random() % 9 == 0 ? kNoFile : uint32_t(random() % writers.size()));
      const int writer = file_of.back() == kNoFile ? -1 : writers[file_of.back()];
      if (writer >= 0) own[static_cast<size_t>(writer)] += shard.bytes;
    }
    const auto loads =
        loads_of(distribute_shards_by_file(shards, sets, ranks, file_of, writers), shards, ranks);
    const uint64_t mean =
        std::accumulate(loads.begin(), loads.end(), uint64_t{0}) / uint64_t(ranks);
    for (size_t rank = 0; rank < loads.size(); ++rank) {
      EXPECT_LE(loads[rank], std::max(own[rank], mean + mean / 4)) << round << " " << rank;
    }
  }
}

TEST(DistributionByFile, WhatCannotBeMeantIsRefused) {
  const Sets sets = {{0}};
  const Shards shards = {{1, 0}};
  const std::vector<int> writers = {0};
  const std::vector<int> outside = {1};
  using Files = std::vector<uint32_t>;
  EXPECT_THROW(distribute_shards_by_file(shards, sets, 1, Files{}, writers), Error);
  EXPECT_THROW(distribute_shards_by_file(shards, sets, 1, Files{1}, writers), Error);
  EXPECT_THROW(distribute_shards_by_file(shards, sets, 1, Files{0}, outside), Error);
  EXPECT_THROW(distribute_shards_by_file(shards, {}, 1, Files{0}, writers), Error);
}

}  // namespace tilestone::distribution_test
