#include "tilestone/comm/communicator.h"

#include <gtest/gtest.h>

#include "tilestone/comm/comm_testing.h"
#include "tilestone/comm/together_testing.h"

namespace tilestone::communicator_test {

TEST(Solo, Conformance) {
  comm_testing::check_every_operation(solo());
  comm_testing::check_random_operations(solo(), 2, 200);
  comm_testing::check_bad_arguments(solo());
}

TEST(Solo, IsWhatADefaultCommunicatorIs) {
  const Communicator comm;
  EXPECT_EQ(comm.describe(), "solo");
  EXPECT_EQ(comm.rank(), 0);
  EXPECT_EQ(comm.size(), 1);
  EXPECT_TRUE(comm.is_coordinator());
}

TEST(Solo, NeverWaitsSoNoDeadlineIsTooShort) {
  const Communicator comm;
  EXPECT_NO_THROW(all_arrive(comm, Deadline::after(std::chrono::seconds(-1))));
}

}  // namespace tilestone::communicator_test
