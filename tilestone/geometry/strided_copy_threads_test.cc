#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tilestone/base/bytes.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::strided_copy_threads_test {

constexpr int64_t kBytes = 9 << 20;

class ThreadedCopy : public testing::Test {
 protected:
  ThreadedCopy() : from(kBytes), plain(kBytes), threaded(kBytes) {
    std::mt19937_64 random(5);
    for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  }

  // Copies the elements from byte `begin` of `from` on, once without threads and once with them.
  void expect_same(const Dims& shape, uint64_t itemsize, const Dims& target_strides,
                   const Dims& source_strides, size_t begin = 0) {
    const StridedView source{from.data() + begin, shape, source_strides, itemsize};
    std::fill(plain.begin(), plain.end(), std::byte{1});
    std::fill(threaded.begin(), threaded.end(), std::byte{1});
    strided_copy({plain.data(), shape, target_strides, itemsize}, source);
    ThreadPool pool(4);
    strided_copy({threaded.data(), shape, target_strides, itemsize}, source, &pool);
    EXPECT_TRUE(plain == threaded);
    EXPECT_FALSE(std::all_of(plain.begin(), plain.end(),
                             [](std::byte byte) { return byte == std::byte{1}; }));
  }

  Bytes from, plain, threaded;
};

TEST_F(ThreadedCopy, OfOneRun) { expect_same({kBytes - 5}, 1, {1}, {1}, 5); }

TEST_F(ThreadedCopy, OfTwoLongRuns) {
  expect_same({2, kBytes / 2 - 64}, 1, {kBytes / 2, 1}, {kBytes / 2 - 32, 1});
}

TEST_F(ThreadedCopy, OfManyShortRuns) { expect_same({kBytes / 64, 48}, 1, {48, 1}, {64, 1}); }

TEST_F(ThreadedCopy, OfATransposition) { expect_same({1024, 1000}, 8, {1000, 1}, {1, 1024}); }

}  // namespace tilestone::strided_copy_threads_test
