#include "tilestone/base/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace tilestone::huge_pages_test {
namespace {

const auto kPage = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));

// The flags of the mapping that contains the address ("hg": the kernel was asked for huge pages).
std::string flags_of(const std::byte* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    uintptr_t begin = 0;
    uintptr_t end = 0;
    char dash = 0;
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= wanted && wanted < end;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return "";
}

bool is_asked_for(const std::byte* address) {
  return flags_of(address).find(" hg ") != std::string::npos;
}

class Mapped {
 public:
  explicit Mapped(uint64_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Mapped() { ::munmap(data_, bytes_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  std::byte* data() const { return data_; }

 private:
  uint64_t bytes_;
  std::byte* data_;
};

TEST(HugePages, AreAskedForOnThePagesOfTheMemoryOnly) {
  const Mapped memory(kHugePage + 4 * kPage);
  const bool exist = ::madvise(memory.data(), kPage, MADV_HUGEPAGE) == 0;
  ::madvise(memory.data(), kPage, MADV_NOHUGEPAGE);
  prefer_huge_pages(memory.data() + kPage + 64, kHugePage + kPage);
  EXPECT_FALSE(is_asked_for(memory.data()));
  EXPECT_EQ(is_asked_for(memory.data() + kPage), exist);
  EXPECT_EQ(is_asked_for(memory.data() + kHugePage + 2 * kPage), exist);
  EXPECT_FALSE(is_asked_for(memory.data() + kHugePage + 3 * kPage));
}

TEST(HugePages, SmallMemoryIsLeftAlone) {
  const Mapped memory(kHugePage);
  prefer_huge_pages(memory.data() + 64, kHugePage - 64);
  prefer_huge_pages(memory.data(), 1);
  prefer_huge_pages(memory.data(), 0);
  EXPECT_FALSE(is_asked_for(memory.data() + kPage));
}

}  // namespace
}  // namespace tilestone::huge_pages_test
