// The lock of a location, which failed saves remove again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::lock_test {

// Whoever opened the lock file before it was removed must not take it for the lock.
TEST(Lock, IsHeldByOneThoughFailedSavesRemoveIt) {
  const TempDirectory folder;
  std::atomic<int> holders = 0, taken = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto place = posix_storage(folder.path() + "/ckpt");
      place->directories()->make("");
      for (int tries = 0; tries < 300; ++tries) {
        try {
          auto lock = engine::claim_location(*place);
          if (lock == nullptr) continue;
          EXPECT_EQ(++holders, 1);
          ++taken;
          std::this_thread::yield();
          --holders;
          if ((tries + i) % 2 == 0) engine::remove_lock_directory(*place, lock);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(taken, 4);
  const auto parent = posix_storage(folder.path());
  EXPECT_THAT(parent->list_directories(), testing::ElementsAre("ckpt"));
}

}  // namespace tilestone::lock_test
