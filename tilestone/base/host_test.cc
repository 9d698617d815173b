#include "tilestone/base/host.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tilestone::host_test {

TEST(HostIdentity, IsTheSameInAnotherProcess) {
  const std::string mine = host_identity();
  EXPECT_GT(mine.size(), 1u);
  const pid_t child = fork();
  if (child == 0) _exit(host_identity() == mine ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace tilestone::host_test
