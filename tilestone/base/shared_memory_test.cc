#include "tilestone/base/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

namespace tilestone {
namespace {

TEST(SharedMemory, AnotherProcessReadsWhatIsWrittenLater) {
  const auto memory = SharedMemory::make(1 << 20);
  ASSERT_NE(memory, nullptr);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto found = SharedMemory::find(memory->name());
    char one = 0;
    const bool is_written = ::read(ready[0], &one, 1) == 1;
    const bool is_same = found != nullptr && found->bytes().size() == 1u << 20 &&
                         std::memcmp(found->bytes().data() + 7777, "abc", 3) == 0;
    ::_exit(is_written && is_same ? 0 : 1);
  }
  std::memcpy(memory->bytes().data() + 7777, "abc", 3);
  ASSERT_EQ(::write(ready[1], "x", 1), 1);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(SharedMemory, ANameThatIsNoLongerItsIsNotFound) {
  auto memory = SharedMemory::make(4096);
  const std::string name = memory->name();
  memory = SharedMemory::make(4096);  // another id
  EXPECT_EQ(SharedMemory::find(name), nullptr);
  EXPECT_EQ(SharedMemory::find(""), nullptr);
  memory.reset();
  EXPECT_EQ(SharedMemory::find(name), nullptr);
}

}  // namespace
}  // namespace tilestone
