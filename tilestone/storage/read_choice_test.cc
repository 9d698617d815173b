#include <gtest/gtest.h>

#include "tilestone/storage/posix_internal.h"

namespace tilestone::read_choice_test {

constexpr uint64_t kMiB = 1u << 20;

// Simulates the blocks of reads, which overlap as in real batches.
struct Trial {
  ReadChoice choice;
  double now = 0;
  // Reads `bytes` block by block. Returns the share that was read directly.
  double read(uint64_t bytes, double direct_rate, double cached_rate) {
    constexpr uint64_t kBlock = 8 * kMiB;
    uint64_t direct_bytes = 0;
    choice.begin(bytes);
    for (uint64_t at = 0; at < bytes; at += kBlock) {
      const bool direct = choice.pick_direct();
      choice.started(direct, now);
      now += static_cast<double>(kBlock) / (direct ? direct_rate : cached_rate);
      choice.finished(kBlock, direct, now);
      direct_bytes += direct ? kBlock : 0;
    }
    return static_cast<double>(direct_bytes) / static_cast<double>(bytes);
  }
};

TEST(ReadChoice, SmallBatchesAreReadDirectly) {
  Trial trial;
  for (int i = 0; i < 10; ++i) EXPECT_EQ(trial.read(512 * kMiB, 1e9, 5e9), 1);
}

TEST(ReadChoice, ALargeBatchFindsOutWhetherThePageCacheIsFaster) {
  Trial slower, faster;
  EXPECT_GE(slower.read(2048 * kMiB, 2e9, 1e9), 0.9);
  EXPECT_EQ(slower.read(2048 * kMiB, 2e9, 1e9), 1);
  EXPECT_LE(faster.read(2048 * kMiB, 1e9, 2e9), 0.1);
  EXPECT_EQ(faster.read(2048 * kMiB, 1e9, 2e9), 0);
  EXPECT_GE(faster.read(2048 * kMiB, 1e9, 0.1e9), 0.9);  // the cache got slow: not tried again
  EXPECT_EQ(faster.read(2048 * kMiB, 1e9, 2e9), 1);
}

}  // namespace tilestone::read_choice_test
