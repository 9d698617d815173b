#include "tilestone/base/block_sums.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_testing.h"

namespace tilestone::block_sums_test {

constexpr uint64_t kLeast = 64u << 10;

Bytes random_bytes(size_t size) {
  std::mt19937_64 random(size);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(BlockBytes, GiveAtMost64BlocksOf64KiBTo4MiB) {
  EXPECT_EQ(block_bytes_for(0), kLeast);
  EXPECT_EQ(block_bytes_for(1), kLeast);
  EXPECT_EQ(block_bytes_for(64 * kLeast), kLeast);
  EXPECT_EQ(block_bytes_for(64 * kLeast + 1), 2 * kLeast);
  EXPECT_EQ(block_bytes_for(256u << 20), 4u << 20);
  EXPECT_EQ(block_bytes_for(uint64_t{1} << 40), 4u << 20);
  EXPECT_EQ(block_bytes_for(~uint64_t{0}), 4u << 20);
  for (uint64_t bytes = 1; bytes <= 256u << 20; bytes = bytes * 7 / 4 + 1) {
    EXPECT_LE(block_count(bytes, block_bytes_for(bytes)), 64u) << bytes;
  }
}

TEST(BlockSums, CombineToTheChecksumOfThePayload) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{kLeast}, size_t{kLeast + 1},
                            size_t{3 * kLeast}, size_t{5 * kLeast - 7}, size_t{9'000'001}}) {
    const Bytes payload = random_bytes(size);
    BlockSummer summer(size);
    std::mt19937_64 random(3);
    for (size_t at = 0; at < size;) {
      const ByteView rest = ByteView(payload).subspan(at);
      ByteView part = rest.first(std::min<size_t>(rest.size(), 1 + random() % 200'000));
      if (random() % 3 == 0) {
        EXPECT_EQ(summer.add(part), crc32(part));
      } else {
        part = part.first(std::min<size_t>(part.size(), summer.left()));
        if (random() % 2 == 0) {
          summer.advance(part.size(), crc32(part, summer.seed()));
        } else {
          summer.add_crc(part.size(), crc32(part));
        }
      }
      at += part.size();
    }
    const BlockSums sums = summer.take();
    EXPECT_EQ(sums.bytes, size);
    EXPECT_EQ(sums.combined(), crc32(payload)) << size;
    ASSERT_EQ(sums.crc32.size(), block_count(size, sums.block_bytes));
    for (size_t b = 0; b < sums.crc32.size(); ++b) {
      const size_t begin = b * sums.block_bytes;
      const size_t end = std::min<size_t>(size, begin + sums.block_bytes);
      EXPECT_EQ(sums.crc32[b], crc32(ByteView(payload).subspan(begin, end - begin)));
    }
  }
}

TEST(BlockSums, ABlocksEndIsNotPassed) {
  BlockSummer summer(3 * kLeast);
  EXPECT_EQ(error_of([&] { summer.advance(kLeast + 1, 0); }).code(), ErrorCode::kInternal);
}

}  // namespace tilestone::block_sums_test
