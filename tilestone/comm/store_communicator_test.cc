#include "tilestone/comm/store_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/comm/store_communicator_testing.h"

namespace tilestone::store_communicator_test {

using comm_testing::MessageMap;
using comm_testing::ViewOf;

ViewOf place() {
  return [map = std::make_shared<MessageMap>()](int) { return comm_testing::store_over(map); };
}

TEST(StoreCommunicator, AMapIsAPlaceForMessages) {
  comm_testing::check_messages(place());
  comm_testing::check_meeting(place);
}

TEST(StoreCommunicator, RanksMeetThoughAnswersAreLostLateOrRepeated) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    comm_testing::check_meeting([&]() -> ViewOf {
      return [view = place(), seed](int process) {
        return comm_testing::unsteady(view(process), 100 * seed + static_cast<uint64_t>(process));
      };
    });
    if (testing::Test::HasFailure()) return;
  }
}

TEST(StoreCommunicator, AGroupsMessageThatIsTornIsNamed) {
  const auto map = std::make_shared<MessageMap>();
  const auto store = comm_testing::store_over(map);
  StoreCommunicator first(store, 0, 4, {1}), second(store, 1, 4, {1});
  const Deadline never = Deadline::never();
  first.leave(to_bytes("a"), never);
  second.leave(to_bytes("b"), never);
  EXPECT_TRUE(second.join_group(never));
  const Bytes whole = map->messages.at("0/all");
  for (const Bytes& bytes : {Bytes(), Bytes(whole.begin(), whole.end() - 1)}) {
    map->messages["0/all"] = bytes;
    StoreCommunicator reader(store, -1, 4, {1});
    try {
      reader.message_of(1);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
      EXPECT_THAT(error.what(), testing::HasSubstr("0/all"));
    }
  }
}

}  // namespace tilestone::store_communicator_test
