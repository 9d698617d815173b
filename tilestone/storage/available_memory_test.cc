#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tilestone/storage/available_memory_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::available_memory_test {

constexpr uint64_t kMiB = 1u << 20;

// A machine with 1000 MiB of available memory, and with control groups as a test asks for.
struct Machine {
  TempDirectory root;
  Machine() { put("/proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable:    1024000 kB\n"); }
  void put(const std::string& path, const std::string& text) const {
    const std::filesystem::path file(root.path() + path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void put(const std::string& path, uint64_t mib) const { put(path, std::to_string(mib * kMiB)); }
  uint64_t mib() const { return available_memory(root.path()) / kMiB; }
};

TEST(AvailableMemory, WithoutControlGroupsItIsWhatTheMachineSays) {
  EXPECT_EQ(Machine().mib(), 1000u);
  EXPECT_EQ(available_memory("/no such directory"), 0u);
  EXPECT_GT(available_memory(), 0u);
}

TEST(AvailableMemory, AGroupsLimitCountsAndItsCachedPagesAreNotUsed) {
  const Machine v2;
  v2.put("/proc/self/cgroup", "0::/a/b\n");
  v2.put("/sys/fs/cgroup/a/b/memory.max", "max\n");
  v2.put("/sys/fs/cgroup/a/b/memory.current", 1);
  EXPECT_EQ(v2.mib(), 1000u);
  v2.put("/sys/fs/cgroup/a/memory.max", 600);
  v2.put("/sys/fs/cgroup/a/memory.current", 500);
  EXPECT_EQ(v2.mib(), 100u);
  v2.put("/sys/fs/cgroup/a/memory.stat", "anon 7\nfile 1\ninactive_file " +
                                             std::to_string(150 * kMiB) + "\nactive_file " +
                                             std::to_string(50 * kMiB) + "\n");
  EXPECT_EQ(v2.mib(), 300u);
  v2.put("/sys/fs/cgroup/a/b/memory.max", 41);
  EXPECT_EQ(v2.mib(), 40u);
}

// The container's own group is the mount, although the process sees its path outside.
TEST(AvailableMemory, InAContainerTheMountsLimitCounts) {
  const Machine v1;
  v1.put("/proc/self/cgroup", "3:cpu,cpuacct:/x\n2:hugetlb,memory:/docker/abc\n");
  v1.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", 300);
  v1.put("/sys/fs/cgroup/memory/memory.usage_in_bytes", 250);
  v1.put("/sys/fs/cgroup/memory/memory.stat",
         "total_inactive_file " + std::to_string(30 * kMiB) + "\ntotal_active_file 0\n");
  EXPECT_EQ(v1.mib(), 80u);
  v1.put("/sys/fs/cgroup/memory/memory.usage_in_bytes", 400);
  EXPECT_EQ(v1.mib(), 0u);
}

TEST(AvailableMemory, IsWhatAStorageAndItsChildrenSay) {
  const auto storage = posix_storage(testing::TempDir());
  EXPECT_GT(storage->available_cache(), 0u);
  EXPECT_GT(storage->child("a")->available_cache(), 0u);
}

}  // namespace tilestone::available_memory_test
