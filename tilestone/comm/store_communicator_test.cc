#include "tilestone/comm/store_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
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

// Counts what a process asks for: each name is a request.
class Counted : public MessageStore {
 public:
  explicit Counted(std::shared_ptr<MessageStore> store) : store_(std::move(store)) {}
  bool put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) override {
    ++requests;
    return store_->put_if_absent(name, bytes, deadline);
  }
  std::optional<Bytes> get(const std::string& name) override {
    names.insert(name);
    ++requests;
    return store_->get(name);
  }
  std::vector<bool> exist(std::span<const std::string> asked) override {
    names.insert(asked.begin(), asked.end());
    requests += static_cast<int>(asked.size());
    return store_->exist(asked);
  }
  void remove(std::span<const std::string> given) override { store_->remove(given); }

  std::set<std::string> names;
  int requests = 0;

 private:
  const std::shared_ptr<MessageStore> store_;
};

TEST(StoreCommunicator, OnlyTheRequestsOfWhoJoinsAGroupGrowWithTheWorldAndByItsRoot) {
  for (const int ranks : {64, 1024, kReduced ? 4096 : 16384}) {
    SCOPED_TRACE(ranks);
    const int root = static_cast<int>(std::sqrt(ranks));
    const int groups = ranks > StoreCommunicator::Tree().most_names ? root : 1;
    const auto map = std::make_shared<MessageMap>();
    int leaders = 0, most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto store = std::make_shared<Counted>(comm_testing::store_over(map));
      StoreCommunicator comm(store, rank, ranks, {});
      comm.leave(to_bytes("receipt"), Deadline::never());
      comm.group_is_complete(Deadline::never());
      if (store->requests > 6) ++leaders;
      most = std::max(most, store->requests);
    }
    EXPECT_EQ(leaders, groups);
    EXPECT_LE(most, 2 * (ranks / groups) + 6);
    const auto store = std::make_shared<Counted>(comm_testing::store_over(map));
    StoreCommunicator gatherer(store, -1, ranks, {});
    ASSERT_TRUE(gatherer.is_complete(Deadline::never()));
    EXPECT_EQ(gatherer.take().value().size(), static_cast<size_t>(ranks));
    EXPECT_LE(store->requests, 2 * std::max(root, ranks / groups) + 1);
    EXPECT_LE(store->names.size(), 256u);
  }
}

// A place where a request takes 20 ms and a process has 16 in progress, in virtual time: a message
// is seen by who looks after it was left.
struct TimedMap {
  std::map<std::string, std::pair<double, Bytes>> messages;  // when it was left, in seconds
};
class Timed : public MessageStore {
 public:
  explicit Timed(std::shared_ptr<TimedMap> map) : map_(std::move(map)) {}
  bool put_if_absent(const std::string& name, ByteView bytes, Deadline) override {
    const bool is_first = !get(name);
    if (is_first) map_->messages[name] = {now, Bytes(bytes.begin(), bytes.end())};
    return is_first;
  }
  std::optional<Bytes> get(const std::string& name) override {
    now += kRequest;
    return find(name);
  }
  std::vector<bool> exist(std::span<const std::string> names) override {
    now += kRequest;
    std::vector<bool> there;
    for (const std::string& name : names) there.push_back(find(name).has_value());
    return there;
  }
  std::vector<std::optional<Bytes>> get_all(std::span<const std::string> names) override {
    now += kRequest * static_cast<double>((names.size() + 15) / 16);
    std::vector<std::optional<Bytes>> messages;
    for (const std::string& name : names) messages.push_back(find(name));
    return messages;
  }
  bool finds_many() const override { return true; }
  void remove(std::span<const std::string>) override { ADD_FAILURE(); }

  double now = 0;  // of this process

 private:
  static constexpr double kRequest = 0.02;

  std::optional<Bytes> find(const std::string& name) const {
    const auto found = map_->messages.find(name);
    const bool is_there = found != map_->messages.end() && found->second.first <= now;
    return is_there ? std::optional(found->second.second) : std::nullopt;
  }
  const std::shared_ptr<TimedMap> map_;
};

// As in a save in the background (engine/save/background_meeting.cc): all ranks report at the same
// time, the first of each group joins, rank 0 gathers, the others look for what it leaves.
TEST(StoreCommunicator, SixteenThousandRanksMeetInTenSecondsWhereARequestTakesTwentyMilliseconds) {
  constexpr int kRanks = 16384;
  const Deadline never = Deadline::never();
  const auto map = std::make_shared<TimedMap>();
  struct Process {
    std::shared_ptr<Timed> store;
    StoreCommunicator comm;
  };
  std::vector<Process> leaders;
  for (int rank = 1; rank < kRanks; ++rank) {
    const auto store = std::make_shared<Timed>(map);
    StoreCommunicator comm(store, rank, kRanks, {});
    comm.leave(to_bytes("receipt"), never);
    if (comm.leads_group()) leaders.push_back({store, std::move(comm)});
  }
  for (Process& leader : leaders) {
    while (!leader.comm.group_is_complete(never)) leader.store->now += 0.2;  // the longest pause
  }
  const auto store = std::make_shared<Timed>(map);
  StoreCommunicator gatherer(store, 0, kRanks, {});
  gatherer.keep(to_bytes("receipt"));
  while (!gatherer.is_complete(never)) store->now += 0.05;
  EXPECT_EQ(gatherer.take().value().size(), static_cast<size_t>(kRanks));
  decide(*store, "ended", {}, never);
  const double all_know = store->now + Pauses(kRanks).longest().count() + 0.02;
  EXPECT_LE(all_know, 10);
  RecordProperty("seconds", std::to_string(all_know));
}

}  // namespace tilestone::store_communicator_test
