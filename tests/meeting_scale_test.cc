// How many requests a gather over messages takes, for up to 16,384 ranks. One thread does the work
// of all of them, in virtual time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/pause.h"
#include "tilestone/comm/store_communicator.h"
#include "tilestone/comm/store_communicator_testing.h"

namespace tilestone::meeting_scale_test {

using comm_testing::MessageMap;

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

TEST(MeetingScale, OnlyTheRequestsOfWhoJoinsAGroupGrowWithTheWorldAndByItsRoot) {
  constexpr StoreCommunicator::Tree kTree{0, false};
  for (const int ranks : {64, 1024, 16384}) {
    SCOPED_TRACE(ranks);
    const int root = static_cast<int>(std::sqrt(ranks));
    const auto map = std::make_shared<MessageMap>();
    int joiners = 0, most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto store = std::make_shared<Counted>(comm_testing::store_over(map));
      StoreCommunicator comm(store, rank, ranks, kTree);
      comm.leave(to_bytes("receipt"), Deadline::never());
      EXPECT_EQ(comm.is_complete(Deadline::never()), rank == ranks - 1);
      if (store->requests > 6) ++joiners;
      most = std::max(most, store->requests);
    }
    EXPECT_EQ(joiners, root);
    EXPECT_LE(most, 4 * root + 6);
    const auto store = std::make_shared<Counted>(comm_testing::store_over(map));
    StoreCommunicator gatherer(store, -1, ranks, kTree);
    ASSERT_TRUE(gatherer.is_complete(Deadline::never()));
    EXPECT_EQ(gatherer.take().value().size(), static_cast<size_t>(ranks));
    EXPECT_LE(store->requests, 2 * root + 1);
    EXPECT_LE(store->names.size(), 256u);
  }
}

// A place where a request takes 20 ms and a process has 16 in progress, in virtual time: a message
// is seen by who looks after it was left, and before it was removed.
struct TimedMap {
  struct Message {
    Bytes bytes;
    double left, removed;  // in seconds
  };
  std::map<std::string, Message> messages;
};
class Timed : public MessageStore {
 public:
  explicit Timed(std::shared_ptr<TimedMap> map) : map_(std::move(map)) {}
  bool put_if_absent(const std::string& name, ByteView bytes, Deadline) override {
    const bool is_first = !get(name);
    constexpr double kNever = 1e9;
    if (is_first) map_->messages[name] = {Bytes(bytes.begin(), bytes.end()), now, kNever};
    return is_first;
  }
  std::optional<Bytes> get(const std::string& name) override {
    pass(1);
    return find(name);
  }
  std::vector<bool> exist(std::span<const std::string> names) override {
    pass(1);
    std::vector<bool> there;
    for (const std::string& name : names) there.push_back(find(name).has_value());
    return there;
  }
  std::vector<std::optional<Bytes>> get_all(std::span<const std::string> names) override {
    pass(names.size());
    std::vector<std::optional<Bytes>> messages;
    for (const std::string& name : names) messages.push_back(find(name));
    return messages;
  }
  bool finds_many() const override { return true; }
  void remove(std::span<const std::string> names) override {
    pass(1);
    for (const std::string& name : names) map_->messages.at(name).removed = now;
  }

  double now = 0;  // of this process
  size_t requests = 0;

 private:
  void pass(size_t count) {
    constexpr double kRequest = 0.02;
    now += kRequest * static_cast<double>((count + 15) / 16);
    requests += count;
  }
  std::optional<Bytes> find(const std::string& name) const {
    const auto found = map_->messages.find(name);
    if (found == map_->messages.end()) return std::nullopt;
    const auto& [bytes, left, removed] = found->second;
    return left <= now && now < removed ? std::optional(bytes) : std::nullopt;
  }
  const std::shared_ptr<TimedMap> map_;
};

// A place where the ranks from `first` on have left their messages.
std::shared_ptr<TimedMap> place_of(int ranks, StoreCommunicator::Tree tree, int first = 0) {
  const auto map = std::make_shared<TimedMap>();
  Timed store(map);
  const StoreCommunicator comm(nullptr, -1, ranks, tree);
  for (int rank = first; rank < ranks; ++rank) {
    store.now = 0;
    store.put_if_absent(comm.name_of(rank), as_bytes("receipt"), Deadline::never());
  }
  return map;
}

// All have left their messages when the first one looks, as in a save by files. `apart`: the time
// between two ranks.
void expect_few_requests(int ranks, double apart) {
  SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(apart) + " s apart");
  constexpr StoreCommunicator::Tree kTree{0, true};
  const Deadline never = Deadline::never();
  const auto root = static_cast<size_t>(std::sqrt(ranks));
  const auto map = place_of(ranks, kTree);
  size_t joiners = 0, gatherers = 0, most = 0, most_of_joiners = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto store = std::make_shared<Timed>(map);
    StoreCommunicator comm(store, rank, ranks, kTree);
    comm.leave(to_bytes("receipt"), never);
    store->now = 1 + apart * rank;
    store->requests = 0;
    gatherers += comm.is_complete(never);
    const bool joins = store->requests > 3;
    joiners += joins;
    (joins ? most_of_joiners : most) = std::max(joins ? most_of_joiners : most, store->requests);
  }
  EXPECT_EQ(joiners, root);
  EXPECT_EQ(gatherers, 1u);
  EXPECT_LE(most, 3u);
  EXPECT_LE(most_of_joiners, 2 * root + 7);
}

TEST(MeetingScale, OfRanksThatComeTogetherOneReadsTheMessagesOfItsGroup) {
  for (const int ranks : {64, 1024, 16384}) {
    for (const double apart : {0.0, 0.0005}) expect_few_requests(ranks, apart);
  }
}

// As in a save in the background (engine/save/background_meeting.cc): all ranks report at the same
// time, one of each group joins, rank 0 gathers, the others look for what it leaves.
TEST(MeetingScale, SixteenThousandRanksMeetInTenSecondsWhereARequestTakesTwentyMilliseconds) {
  constexpr int kRanks = 16384;
  const Deadline never = Deadline::never();
  const auto map = place_of(kRanks, {}, 1);
  for (int rank = 1; rank < kRanks; ++rank) {
    StoreCommunicator comm(std::make_shared<Timed>(map), rank, kRanks, {});
    comm.leave(to_bytes("receipt"), never);
    comm.join_group(never);
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

}  // namespace tilestone::meeting_scale_test
