// Simulates a crash of the machine at every storage call of a save. All, none or any part of the
// unsynced data survives. Or each call goes wrong in each way. Afterwards a new reader must find
// the whole previous checkpoint or the whole new one, and a later save must succeed.
//
// A location is the root of a storage, so a save next to an older checkpoint is a first save on a
// storage of its own. tests/kills has both cases in one real folder.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <set>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::crash_points_test {

constexpr int64_t kOld = 100;  // the first element of the existing checkpoint
constexpr int64_t kNew = 500;
constexpr int64_t kLater = 900;
constexpr int64_t kUnsynced = 300;  // of a save that died before its last sync
constexpr int kEarlier = 100;       // first client number of the ranks of that save
constexpr auto kOrderLimit = std::chrono::seconds(10);  // for a wait that normally is short

// Disables the log, which would report every simulated crash.
struct Quiet {
  LogLevel before = set_log_level(LogLevel::kOff);
  ~Quiet() { set_log_level(before); }
};

struct Scenario {
  const char* name;
  FileImage before;
  int ranks = 2;
  bool old_stands = false;
  std::optional<std::array<int, 3>> order = {};  // in which ranks finish writing; none: any order
  // If set, an earlier save renamed its metadata and died before it had synced the directory, so a
  // power loss may revert the rename.
  bool after_unsynced = false;
  bool copies = false;         // each rank keeps copies of the chunks that the others write
  bool in_background = false;  // by async_save
  std::shared_ptr<Storage> (*make)(FileImage) = &memory_storage;
};

// Where the lease of who has died has lapsed.
std::shared_ptr<Storage> lapsed_objects(FileImage image) {
  image.erase(".tilestone/lock");
  return memory_objects(std::move(image));
}

void save_rows(const Communicator& comm, const std::shared_ptr<Storage>& storage, int64_t first,
               bool overwrite, bool copies = false, bool in_background = false) {
  SaveOptions options;
  options.comm = comm;
  options.overwrite = overwrite;
  options.resources.buffer_bytes = 1u << 20;
  options.timeout = 60;
  if (copies) options.copies.emplace();
  for (int rank = 0; copies && rank < comm.size(); ++rank) options.copies->group.push_back(rank);
  if (in_background) {
    async_save(row_state(comm, first), Location(storage), options).result();
  } else {
    save(row_state(comm, first), Location(storage), options);
  }
}

FileImage saved_image(int ranks, int64_t first, bool copies = false) {
  const auto storage = memory_storage();
  run_ranks(ranks, [&](Communicator comm) { save_rows(comm, storage, first, false, copies); });
  return memory_image(*storage);
}

// Files of a save that wrote all its data and was killed before it published.
FileImage failed_attempt() {
  FileImage image = saved_image(3, kOld);
  image.erase(".metadata");
  return image;
}

// Makes ranks finish writing in a given order. Each rank is held before the sync of its data file
// until the previous rank reaches its last call, the sync of the directory. A rank that never makes
// that call fails the test.
class FinishingOrder {
 public:
  explicit FinishingOrder(const std::array<int, 3>& order) : order_(order) {}

  void before(const StorageCall& call) {
    std::unique_lock lock(mutex_);
    if (call.op == StorageOp::kSync && call.name.ends_with(".distcp")) {
      const bool in_turn = changed_.wait_for(lock, kOrderLimit,
                                             [&] { return over_ || order_[turn_] == call.client; });
      if (!in_turn) {
        ADD_FAILURE() << "rank " << order_[turn_]
                      << " has not synced the directory of its data file";
        over_ = true;
        changed_.notify_all();
      }
      finishing_.insert(call.client);
    } else if (call.op == StorageOp::kSettle && finishing_.erase(call.client) > 0) {
      ++turn_;
      over_ = over_ || turn_ == order_.size();
      changed_.notify_all();
    }
  }
  // Releases all ranks.
  void end() {
    std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }

 private:
  const std::array<int, 3> order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<int> finishing_;
  size_t turn_ = 0;
  bool over_ = false;
};

FaultAction die_after_the_rename(const StorageCall& call) {
  const bool last = call.op == StorageOp::kRename && call.to == ".metadata";
  return last ? FaultAction::die_after() : FaultAction::pass();
}

// `ended`: whether no rank has thrown.
std::shared_ptr<FaultDisk> save_on(const Scenario& scenario, const FaultHook& hook,
                                   bool* ended = nullptr) {
  std::optional<FinishingOrder> order;
  if (scenario.order) order.emplace(*scenario.order);
  const auto ordered = [&](const StorageCall& call) {
    if (call.client >= kEarlier) return die_after_the_rename(call);
    if (order) order->before(call);
    const FaultAction action = hook(call);
    if (order && action.then == FaultAction::Then::kCrash) order->end();
    return action;
  };
  const auto disk = FaultDisk::create(scenario.make(scenario.before), ordered);
  if (scenario.after_unsynced) {
    run_ranks_collect(scenario.ranks, [&](Communicator comm) {
      save_rows(comm, disk->storage(kEarlier + comm.rank()), kUnsynced, true);
    });
  }
  const auto thrown = run_ranks_collect(scenario.ranks, [&](Communicator comm) {
    save_rows(comm, disk->storage(comm.rank()), kNew, scenario.old_stands, scenario.copies,
              scenario.in_background);
  });
  if (ended != nullptr) *ended = std::ranges::count(thrown, nullptr) == std::ssize(thrown);
  return disk;
}

// The first element of the checkpoint in the storage; 0 if there is none. A checkpoint that is not
// whole fails the test.
int64_t find_checkpoint(const std::shared_ptr<Storage>& storage, size_t copies = 0) {
  try {
    OpenOptions options;
    options.resources.threads = 1;
    options.resources.buffer_bytes = 1u << 20;
    const Checkpoint checkpoint = Checkpoint::open(Location(storage), options);
    const int64_t first = checkpoint.read_object("step").as_int();
    const VerifyReport report = checkpoint.verify();
    EXPECT_TRUE(report.ok()) << report.damages.front().problem;
    EXPECT_EQ(checkpoint.metadata().copies.size(), copies);
    const TensorView rows = checkpoint.read("w");
    EXPECT_EQ(elements(rows), elements(counting(DType::kFloat32, rows.shape, first)));
    EXPECT_EQ(elements(checkpoint.read("p")), elements(counting(DType::kInt64, {3}, first)));
    return first;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    return 0;
  }
}

// Returns what was found.
int64_t judge(const Scenario& scenario, const FileImage& image, uint64_t number) {
  const auto storage = scenario.make(image);
  const int64_t found = find_checkpoint(storage, scenario.copies ? 1 : 0);  // of "p"
  const int64_t old = scenario.old_stands ? kOld : 0;
  const bool unsynced = scenario.after_unsynced && found == kUnsynced;
  EXPECT_TRUE(found == old || found == kNew || unsynced) << "found " << found;
  if (number % 4 != 0 || testing::Test::HasFailure())
    return found;  // a later save takes longer than everything else
  save_rows(Communicator(), storage, kLater, found != 0);
  EXPECT_EQ(find_checkpoint(storage), kLater);
  return found;
}

// The machine dies at every n-th point. CMake sets it; it is greater than 1 under sanitizers.
constexpr uint64_t kStride = TILESTONE_CRASH_STRIDE;
constexpr uint64_t kAnswerStride = 7 * kStride;
// For random survival of unsynced data.
constexpr uint64_t kSeeds = 16;

class CrashPoints : public testing::Test {
 protected:
  static void TearDownTestSuite() {
    std::printf("[          ] %lu crash points in all\n", static_cast<unsigned long>(total_));
  }
  static void expect_safe_everywhere(const Scenario& scenario) {
    const Quiet quiet;
    SCOPED_TRACE(scenario.name);
    const uint64_t points = crash_everywhere(
        [&](const FaultHook& hook) { return save_on(scenario, hook); },
        [&](const FileImage& image, uint64_t number) { judge(scenario, image, number); }, kStride,
        kSeeds);
    std::printf("[          ] %s: %lu crash points\n", scenario.name,
                static_cast<unsigned long>(points));
    EXPECT_GT(points, (scenario.make == &memory_storage ? 100u : 20u) / kStride);
    total_ += points;
  }
  static void expect_safe_answers(const Scenario& scenario) {
    const Quiet quiet;
    SCOPED_TRACE(scenario.name);
    bool ended = false;
    uint64_t made = 0;
    const uint64_t points =
        fail_everywhere([&](const FaultHook& hook) { return save_on(scenario, hook, &ended); },
                        [&](const FileImage& image, uint64_t number) {
                          const int64_t found = judge(scenario, image, number);
                          EXPECT_TRUE(!ended || found == kNew);
                          made += found == kNew;
                        },
                        kAnswerStride);
    std::printf("[          ] %s: %lu calls went wrong, the new checkpoint after %lu\n",
                scenario.name, static_cast<unsigned long>(points),
                static_cast<unsigned long>(made));
    EXPECT_GT(made, 0u);
    EXPECT_LT(made, points);
  }

 private:
  static inline uint64_t total_ = 0;
};

TEST_F(CrashPoints, FirstSave) { expect_safe_everywhere({"first save", {}, 2, false}); }

TEST_F(CrashPoints, Overwrite) {
  expect_safe_everywhere({"overwrite", saved_image(2, kOld), 2, true});
}

// What the ranks do after the call, each alone, overlaps in any order.
TEST_F(CrashPoints, SavesInTheBackground) {
  Scenario first{"first save in the background", {}, 2, false};
  Scenario overwrite{"overwrite in the background", saved_image(2, kOld), 2, true};
  first.in_background = overwrite.in_background = true;
  expect_safe_everywhere(first);
  expect_safe_everywhere(overwrite);
  overwrite.name = "overwrite in the background, objects";
  overwrite.make = &lapsed_objects;
  expect_safe_everywhere(overwrite);
}

TEST_F(CrashPoints, AnswersOfSavesInTheBackground) {
  for (const auto make : {&memory_storage, &lapsed_objects}) {
    const std::string where = make == &memory_storage ? "" : ", objects";
    const std::string names[] = {"first save in the background" + where,
                                 "overwrite in the background" + where};
    Scenario first{names[0].c_str(), {}, 2, false};
    Scenario overwrite{names[1].c_str(), saved_image(2, kOld), 2, true};
    first.in_background = overwrite.in_background = true;
    first.make = overwrite.make = make;
    expect_safe_answers(first);
    expect_safe_answers(overwrite);
  }
}

TEST_F(CrashPoints, OverwriteWithLocalCopies) {
  Scenario scenario{"overwrite with copies", saved_image(2, kOld, true), 2, true};
  scenario.copies = true;
  expect_safe_everywhere(scenario);
  expect_safe_answers(scenario);
}

TEST_F(CrashPoints, AfterASaveWhoseRenameWasNotSynced) {
  Scenario scenario{"after an unsynced rename", saved_image(2, kOld), 2, true};
  scenario.after_unsynced = true;
  expect_safe_everywhere(scenario);
}

TEST_F(CrashPoints, RetryAfterAFailedAttempt) {
  expect_safe_everywhere({"retry", failed_attempt(), 2, false});
}

TEST_F(CrashPoints, RanksThatFinishInEveryOrder) {
  std::array<int, 3> order{0, 1, 2};
  do {
    const std::string name = "finishing in the order " + std::to_string(order[0]) +
                             std::to_string(order[1]) + std::to_string(order[2]);
    expect_safe_everywhere({name.c_str(), saved_image(3, kOld), 3, true, order});
  } while (!HasFailure() && std::next_permutation(order.begin(), order.end()));
}

}  // namespace tilestone::crash_points_test
