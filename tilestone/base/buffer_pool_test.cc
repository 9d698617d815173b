#include "tilestone/base/buffer_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone::buffer_pool_test {

using namespace std::chrono_literals;

constexpr size_t kSize = 8192;  // bytes per buffer

TEST(BufferPool, LendsAlignedBuffersOfTheSizeAskedFor) {
  const auto pool = BufferPool::create(3 * kSize, kSize);
  EXPECT_EQ(pool->buffers(), 3u);
  EXPECT_EQ(pool->buffer_bytes(), kSize);
  Buffer buffer = pool->acquire();
  ASSERT_TRUE(buffer);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % BufferPool::kAlignment, 0u);
  EXPECT_EQ(buffer.capacity(), kSize);
  EXPECT_EQ(buffer.size(), 0u);
  std::memset(buffer.data(), 1, buffer.capacity());
  buffer.set_size(5);
  EXPECT_EQ(buffer.view().size(), 5u);
  EXPECT_EQ(buffer.space().size(), kSize);
}

// No machine has the memory of these buffers.
TEST(BufferPool, TakesNoMemoryBeforeItIsNeeded) {
  EXPECT_EQ(BufferPool::create(size_t{1} << 56, size_t{1} << 50)->buffers(), 64u);
}

TEST(BufferPool, UsesABufferThatCameBackBeforeItTakesMoreMemory) {
  const auto pool = BufferPool::create(100 * kSize, kSize);
  const std::byte* first = pool->acquire().data();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(pool->acquire().data(), first);
  const Buffer a = pool->acquire();
  const std::byte* second = pool->acquire().data();
  EXPECT_EQ(a.data(), first);
  EXPECT_NE(second, first);
  EXPECT_EQ(pool->acquire().data(), second);
}

TEST(BufferPool, ABorrowedBufferComesBackWithNoBytesInUse) {
  const auto pool = BufferPool::create(kSize, kSize);
  pool->acquire().set_size(77);
  EXPECT_EQ(pool->acquire().size(), 0u);
}

TEST(BufferPool, HasAtLeastOneBuffer) {
  EXPECT_EQ(BufferPool::create(0, kSize)->buffers(), 1u);
  EXPECT_EQ(BufferPool::create(kSize - 1, kSize)->buffers(), 1u);
}

TEST(BufferPool, RefusesSizesThatAreNotAligned) {
  EXPECT_THROW(BufferPool::create(kSize, 0), Error);
  EXPECT_THROW(BufferPool::create(kSize, 4097), Error);
}

TEST(BufferPool, TryAcquireGivesNothingWhenAllAreInUse) {
  const auto pool = BufferPool::create(kSize, kSize);
  Buffer held = pool->try_acquire();
  EXPECT_TRUE(held);
  EXPECT_FALSE(pool->try_acquire());
  held = Buffer();
  EXPECT_TRUE(pool->try_acquire());
}

TEST(BufferPool, AcquireThrowsPastItsDeadline) {
  const auto pool = BufferPool::create(kSize, kSize);
  const Buffer held = pool->acquire();
  try {
    pool->acquire(Deadline::after(1ms));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_THAT(error.message(), testing::HasSubstr("1 buffers of 8192 bytes"));
  }
}

TEST(BufferPool, AFreeBufferIsGivenEvenPastTheDeadline) {
  const auto pool = BufferPool::create(kSize, kSize);
  EXPECT_TRUE(pool->acquire(Deadline::after(0s)));
}

TEST(BufferPool, AcquireWaitsForABufferToComeBack) {
  const auto pool = BufferPool::create(kSize, kSize);
  Buffer held = pool->acquire();
  std::jthread giver([&] { held = Buffer(); });
  EXPECT_TRUE(pool->acquire());
}

TEST(BufferPool, NeverLendsABufferTwiceAtOnce) {
  const auto pool = BufferPool::create(3 * kSize, kSize);
  std::atomic<int> torn = 0;
  std::vector<std::set<const std::byte*>> lent(6);  // by borrower
  {
    std::vector<std::jthread> borrowers;
    for (int id = 0; id < 6; ++id) {
      borrowers.emplace_back([&, id] {
        for (int round = 0; round < 300; ++round) {
          Buffer buffer = pool->acquire();
          lent[static_cast<size_t>(id)].insert(buffer.data());
          std::memset(buffer.data(), id, kSize);
          std::this_thread::yield();
          for (const std::byte byte : buffer.space()) {
            if (byte != static_cast<std::byte>(id)) ++torn;
          }
        }
      });
    }
  }
  EXPECT_EQ(torn, 0);
  std::set<const std::byte*> all;
  for (const auto& of_one : lent) all.insert(of_one.begin(), of_one.end());
  EXPECT_LE(all.size(), 3u);
}

TEST(BufferPool, BuffersOfTheDefaultSizeServeALaterPool) {
  std::byte* const first = BufferPool::create()->acquire().data();
  const auto later = BufferPool::create();
  EXPECT_EQ(later->acquire().data(), first);
  // One of another size gets memory of its own.
  const auto other = BufferPool::create(4 * kSize, 2 * kSize);
  EXPECT_NE(other->acquire().data(), first);
}

TEST(Buffer, OutlivesTheLastHolderOfItsPool) {
  Buffer buffer = BufferPool::create(kSize, kSize)->acquire();
  std::memset(buffer.data(), 1, kSize);
}

TEST(Buffer, AMoveHandsItOver) {
  const auto pool = BufferPool::create(2 * kSize, kSize);
  Buffer a = pool->acquire();
  std::byte* const data = a.data();
  a.set_size(9);
  Buffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b.size(), 9u);
  Buffer c = pool->acquire();
  c = std::move(b);  // gives back what c held
  EXPECT_EQ(c.data(), data);
  EXPECT_TRUE(pool->try_acquire());
}

}  // namespace tilestone::buffer_pool_test
