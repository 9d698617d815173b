#include "tilestone/comm/store_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/sanitized_testing.h"
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
  EXPECT_TRUE(second.group_is_complete(never));
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

// Counts what a process asks for.
class Counted : public MessageStore {
 public:
  explicit Counted(std::shared_ptr<MessageStore> store) : store_(std::move(store)) {}
  bool put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) override {
    return store_->put_if_absent(name, bytes, deadline);
  }
  std::optional<Bytes> get(const std::string& name) override {
    names.insert(name);
    ++gets;
    return store_->get(name);
  }
  std::vector<bool> exist(std::span<const std::string> asked) override {
    names.insert(asked.begin(), asked.end());
    return store_->exist(asked);
  }
  void remove(std::span<const std::string> given) override { store_->remove(given); }

  std::set<std::string> names;
  int gets = 0;

 private:
  const std::shared_ptr<MessageStore> store_;
};

TEST(StoreCommunicator, NobodyLooksForMoreThan256NamesAmong16384Ranks) {
  constexpr int kRanks = kReduced ? 1024 : 16384;
  const auto map = std::make_shared<MessageMap>();
  size_t most = 0;
  std::map<int, int> ranks_by_gets;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto store = std::make_shared<Counted>(comm_testing::store_over(map));
    StoreCommunicator comm(store, rank, kRanks, {});
    comm.leave(to_bytes("receipt"), Deadline::never());
    comm.group_is_complete(Deadline::never());
    most = std::max(most, store->names.size());
    ++ranks_by_gets[store->gets];
  }
  const auto store = std::make_shared<Counted>(comm_testing::store_over(map));
  StoreCommunicator gatherer(store, -1, kRanks, {});
  ASSERT_TRUE(gatherer.is_complete(Deadline::never()));
  EXPECT_EQ(gatherer.take().value().size(), static_cast<size_t>(kRanks));
  EXPECT_LE(std::max(most, store->names.size()), 256u);
  // Who is not the last of its group reads no message: it looks twice for the group's.
  EXPECT_LE(ranks_by_gets.rbegin()->first, 256);
  EXPECT_GE(ranks_by_gets[2], kRanks - (kReduced ? 32 : 128));  // groups
}

}  // namespace tilestone::store_communicator_test
