#include "tilestone/base/memory_map.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

namespace tilestone::memory_map_test {

TEST(MemoryMap, PagesThatMayNotBeWrittenAreFoundInTheMiddleAndAtTheEnds) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  // rw, r, rw, rw, none
  auto* const data = static_cast<char*>(
      ::mmap(nullptr, 5 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(data, MAP_FAILED);
  data[0] = 7;
  ASSERT_EQ(::mprotect(data + page, page, PROT_READ), 0);
  ASSERT_EQ(::mprotect(data + 4 * page, page, PROT_NONE), 0);
  const MemoryMap map;
  for (const bool now : {false, true}) {
    const auto writable = [&](uint64_t begin, uint64_t bytes) {
      return now ? is_writable_now(data + begin, bytes) : map.is_writable(data + begin, bytes);
    };
    EXPECT_TRUE(writable(0, page));
    EXPECT_TRUE(writable(10, 1));
    EXPECT_FALSE(writable(page - 1, 2));
    EXPECT_FALSE(writable(page, 1));
    EXPECT_FALSE(writable(0, 3 * page));
    EXPECT_TRUE(writable(2 * page, 2 * page));
    EXPECT_FALSE(writable(2 * page, 2 * page + 1));
    EXPECT_FALSE(writable(4 * page + 5, 8));
    EXPECT_TRUE(writable(page, 0));
  }
  EXPECT_EQ(data[0], 7);
  ::munmap(data, 5 * page);
}

TEST(MemoryMap, TheHeapTheStackAndLargeBlocksMayBeWritten) {
  std::vector<char> small(100), large(4u << 20);
  static const char kConstant[] = "constant";
  const MemoryMap map;
  EXPECT_TRUE(map.is_writable(small.data(), small.size()));
  EXPECT_TRUE(map.is_writable(large.data(), large.size()));
  EXPECT_TRUE(is_writable_now(large.data(), large.size()));
  EXPECT_TRUE(map.is_writable(&map, sizeof map));
  EXPECT_FALSE(map.is_writable(kConstant, sizeof kConstant));
  EXPECT_FALSE(is_writable_now(kConstant, sizeof kConstant));
  EXPECT_FALSE(map.is_writable(small.data(), ~uint64_t{0}));
}

}  // namespace tilestone::memory_map_test
