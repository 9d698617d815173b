#include "tilestone/comm/store_communicator_testing.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"

namespace tilestone::comm_testing {
namespace {

class MapStore : public MessageStore {
 public:
  explicit MapStore(std::shared_ptr<MessageMap> map) : map_(std::move(map)) {}
  bool put_if_absent(const std::string& name, ByteView bytes, Deadline) override {
    const std::lock_guard lock(map_->mutex);
    return map_->messages.emplace(name, Bytes(bytes.begin(), bytes.end())).second;
  }
  std::optional<Bytes> get(const std::string& name) override {
    const std::lock_guard lock(map_->mutex);
    const auto found = map_->messages.find(name);
    return found == map_->messages.end() ? std::nullopt : std::optional(found->second);
  }
  std::vector<bool> exist(std::span<const std::string> names) override {
    const std::lock_guard lock(map_->mutex);
    std::vector<bool> there;
    for (const std::string& name : names) there.push_back(map_->messages.contains(name));
    return there;
  }
  void remove(std::span<const std::string> names) override {
    const std::lock_guard lock(map_->mutex);
    for (const std::string& name : names) map_->messages.erase(name);
  }

 private:
  const std::shared_ptr<MessageMap> map_;
};

class UnsteadyStore : public MessageStore {
 public:
  UnsteadyStore(std::shared_ptr<MessageStore> store, uint64_t seed)
      : store_(std::move(store)), random_(seed) {}
  bool put_if_absent(const std::string& name, ByteView bytes, Deadline deadline) override {
    return request<bool>([store = store_, name, copy = Bytes(bytes.begin(), bytes.end()),
                          deadline] { return store->put_if_absent(name, copy, deadline); });
  }
  std::optional<Bytes> get(const std::string& name) override {
    return request<std::optional<Bytes>>([store = store_, name] { return store->get(name); });
  }
  std::vector<bool> exist(std::span<const std::string> names) override {
    return request<std::vector<bool>>(
        [store = store_, copy = std::vector(names.begin(), names.end())] {
          return store->exist(copy);
        });
  }
  void remove(std::span<const std::string> names) override { store_->remove(names); }

 private:
  template <typename Answer>
  Answer request(std::function<Answer()> work) {
    for (const auto& late : std::exchange(late_, {})) late();
    switch (random_() % 8) {
      case 0:
        fail();
      case 1:
        work();
        fail();
      case 2:
        late_.push_back([work] { work(); });
        fail();
      case 3:
        work();
        return work();
      default:
        return work();
    }
  }
  [[noreturn]] static void fail() { throw Error(ErrorCode::kIo, "no answer"); }

  const std::shared_ptr<MessageStore> store_;
  std::mt19937_64 random_;
  std::vector<std::function<void()>> late_;
};

const Deadline kNever = Deadline::never();

Bytes message_of(int rank, int run) {
  return to_bytes("rank " + std::to_string(rank) + " in run " + std::to_string(run));
}

// Repeats what fails. A process that fails may be started again.
template <typename Work>
auto again(const Work& work) {
  for (;;) {
    try {
      return work();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
    }
  }
}

// What each process found to be the message of each rank, and the verdict.
struct Seen {
  std::mutex mutex;
  std::set<std::vector<Bytes>> gathered;
  std::set<Bytes> verdicts;
};

// A process of a rank: leaves its message, and gathers if it is the first or the last rank.
void take_part(const std::shared_ptr<MessageStore>& store, int rank, int size,
               StoreCommunicator::Tree tree, int run, Seen& seen) {
  StoreCommunicator comm(store, rank, size, tree);
  const Bytes mine = message_of(rank, run);
  const Bytes counts = again([&] { return comm.leave(mine, kNever); });
  again([&] { return comm.is_complete(kNever); });
  const Bytes verdict = again([&] { return decide(*store, "verdict", mine, kNever); });
  std::vector<Bytes> all;
  if (rank == 0 || rank == size - 1) {
    for (Pauses pauses(1); !again([&] { return comm.is_complete(kNever); });) pauses.next(kNever);
    all = again([&] { return comm.take(); }).value();
    EXPECT_EQ(all[static_cast<size_t>(rank)], counts);
    EXPECT_TRUE(again([&] { return comm.missing(true); }).empty());
  }
  const std::lock_guard lock(seen.mutex);
  seen.verdicts.insert(verdict);
  if (!all.empty()) seen.gathered.insert(std::move(all));
}

}  // namespace

std::shared_ptr<MessageStore> store_over(std::shared_ptr<MessageMap> map) {
  return std::make_shared<MapStore>(std::move(map));
}

std::shared_ptr<MessageStore> unsteady(std::shared_ptr<MessageStore> store, uint64_t seed) {
  return std::make_shared<UnsteadyStore>(std::move(store), seed);
}

void check_messages(const ViewOf& view) {
  const auto a = view(0), b = view(1);
  const std::vector<std::string> names{"17", "3/17", "3/all", "failed"};
  EXPECT_EQ(a->exist(names), std::vector<bool>(4, false));
  EXPECT_EQ(a->get("17"), std::nullopt);
  EXPECT_TRUE(a->put_if_absent("17", as_bytes("first"), kNever));
  EXPECT_FALSE(b->put_if_absent("17", as_bytes("second"), kNever));
  EXPECT_FALSE(a->put_if_absent("17", as_bytes("first"), kNever));
  EXPECT_EQ(b->get("17"), to_bytes("first"));
  EXPECT_TRUE(b->put_if_absent("3/17", {}, kNever));
  EXPECT_EQ(a->get("3/17"), Bytes());
  EXPECT_TRUE(b->put_if_absent("failed", as_bytes("new"), kNever));
  EXPECT_EQ(a->get("17"), to_bytes("first"));
  EXPECT_EQ(a->exist(names), (std::vector<bool>{true, true, false, true}));
  a->remove(names);
  EXPECT_EQ(b->exist(names), std::vector<bool>(4, false));
  EXPECT_TRUE(b->put_if_absent("17", as_bytes("fourth"), kNever));
}

void check_meeting(const std::function<ViewOf()>& new_place) {
  using Tree = StoreCommunicator::Tree;
  for (const auto& world :
       {std::pair(1, Tree{}), std::pair(5, Tree{}), std::pair(1, Tree{0, true}),
        std::pair(2, Tree{1, true}), std::pair(5, Tree{1, false}), std::pair(12, Tree{3, true})}) {
    const int size = world.first;
    const Tree tree = world.second;
    SCOPED_TRACE(std::to_string(size) + " ranks");
    const ViewOf view = new_place();
    Seen seen;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      for (int run = 0; run < 2; ++run) {  // two processes of each rank
        threads.emplace_back(
            [&, rank, run] { take_part(view(2 * rank + run), rank, size, tree, run, seen); });
      }
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(seen.gathered.size(), 1u);  // all have found the same
    EXPECT_EQ(seen.verdicts.size(), 1u);
    StoreCommunicator later(view(0), -1, size, tree);
    EXPECT_TRUE(again([&] { return later.is_complete(kNever); }));
    EXPECT_EQ(again([&] { return later.take(); }), *seen.gathered.begin());
  }
}

}  // namespace tilestone::comm_testing
