// One save's transaction alone, without ranks and without a communicator: one thread begins it,
// writes what two ranks would write, and commits. The machine crashes at every storage call; or a
// call fails or comes late, and the transaction is abandoned unless its commit was tried.
// Afterwards the location must hold the whole old checkpoint or the whole new one, and a later
// transaction must succeed.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/orders_internal.h"
#include "tilestone/engine/save/share_internal.h"
#include "tilestone/engine/write/writer_internal.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::crash_points_of_transaction_test {

constexpr int kRanks = 2;
constexpr int64_t kOld = 100;  // the first element of the existing checkpoint
constexpr int64_t kNew = 500;
constexpr int64_t kLater = 900;
// The machine dies, or a call fails, at every n-th point. CMake sets it; it is greater than 1 under
// sanitizers.
constexpr uint64_t kStride = TILESTONE_CRASH_STRIDE;
constexpr uint64_t kAnswerStride = 3 * kStride;
const std::string kPlace = "ckpt";

struct Kind {
  const char* format = "torch_dist";
  const char* dialect = "pytorch";
};

SaveOptions options_of(const Kind& kind) {
  SaveOptions options;
  options.format = format_named(kind.format);
  options.dialect = dialect_named(kind.dialect);
  options.overwrite = true;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 1;
  return options;
}

// What each rank writes of row_state(first).
std::vector<engine::SaveShare> shares_of(const Kind& kind, int64_t first) {
  const std::string save_id = random_uuid();
  std::vector<engine::SaveShare> shares(kRanks);
  std::vector<engine::PlanMessage> messages(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    engine::SaveShare& share = shares[static_cast<size_t>(rank)];
    set_options(share, options_of(kind));
    share.rank = rank;
    share.world_size = kRanks;
    share.save_id = save_id;
    set_state(share, row_state(rank, kRanks, first));
    share.local = make_local_plan(share.items);
    messages[static_cast<size_t>(rank)].plan = share.local.encode();
  }
  const auto made = orders_by_exchange(messages, save_id, *shares[0].format, false);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    engine::Orders orders = made.orders[rank];
    shares[rank].assignment = std::move(orders.assignment);
    if (shares[rank].format->needs_grid()) set_grids(shares[rank], orders.grids);
  }
  return shares;
}

// Each process has a client of its own.
using Client = std::function<std::shared_ptr<Storage>(int rank)>;

// One save, in steps that may be taken one by one.
class Saving {
 public:
  Saving(const Kind& kind, int64_t first, Client client)
      : shares_(shares_of(kind, first)),
        client_(std::move(client)),
        transaction_(client_(0)->child(kPlace), shares_[0].format, shares_[0].dialect,
                     shares_[0].save_id, true) {}

  void begin() { transaction_.begin(Deadline::never()); }

  void write(int rank) {
    const engine::SaveShare& share = shares_[static_cast<size_t>(rank)];
    std::shared_ptr<Storage> place = client_(rank)->child(kPlace);
    if (!transaction_.sibling().empty())
      place = engine::sibling_storage(*place, transaction_.sibling());
    const engine::WriteTask task{&share.items, &share.local,     share.assignment, false,
                                 share.rank,   share.world_size, share.save_id};
    receipts_.push_back(write_items(*place, *share.format, task, share.options, Deadline::never()));
    encoded_.push_back(receipts_.back().encode());
  }

  void prepare() {
    const engine::SaveShare& own = shares_[0];
    transaction_.prepare({.save = {.receipts = receipts_,
                                   .encoded = encoded_,
                                   .of_dialect = own.dialect->encode_index(own.items, *own.format)},
                          .threads = 1},
                         Deadline::never());
  }

  void commit() {
    committed_ = true;
    transaction_.commit(Deadline::never());
  }
  void clean() { transaction_.clean(); }

  std::vector<std::function<void()>> steps() {
    return {[this] { begin(); },   [this] { write(0); }, [this] { write(1); },
            [this] { prepare(); }, [this] { commit(); }, [this] { clean(); }};
  }

  // As a driver does: what was begun and not committed is abandoned.
  void run() {
    try {
      for (const auto& step : steps()) step();
    } catch (const Error&) {
      if (!committed_) transaction_.abandon(receipts_.empty());
      throw;
    }
  }

 private:
  std::vector<engine::SaveShare> shares_;  // by rank
  const Client client_;
  engine::Transaction transaction_;
  std::vector<Receipt> receipts_;
  std::vector<Bytes> encoded_;
  bool committed_ = false;
};

Client one_client(const std::shared_ptr<Storage>& storage) {
  return [storage](int) { return storage; };
}

FileImage saved_image(const Kind& kind) {
  const auto storage = memory_storage();
  Saving(kind, kOld, one_client(storage)).run();
  return memory_image(*storage);
}

// A complete checkpoint of torch's rank-local mode that was never published.
FileImage rank_local_image() {
  const auto storage = memory_storage();
  for (int rank = 0; rank < kRanks; ++rank) {
    save(row_state(rank, kRanks, kOld), storage->child(kPlace), rank_local(rank, kRanks));
  }
  return memory_image(*storage);
}

// Where the lease of who has died has lapsed.
std::shared_ptr<Storage> lapsed_objects(FileImage image) {
  image.erase(kPlace + "/.tilestone/lock");
  return memory_objects(std::move(image));
}

struct Scenario {
  const char* name;
  FileImage before;
  Kind kind = {};
  std::shared_ptr<Storage> (*make)(FileImage) = &memory_storage;
};

std::vector<Scenario> scenarios() {
  const Kind staged{"torch_dist", "megatron"};
  return {{"first", {}},
          {"overwrite", saved_image({})},
          {"first staged", {}, staged},
          {"overwrite staged", saved_image(staged), staged},
          {"zarr over megatron", saved_image(staged), {"zarr", "megatron"}},
          {"rank-local replaced", rank_local_image()},
          {"first in objects", {}, {}, &lapsed_objects},
          {"overwrite in objects", saved_image({}), {}, &lapsed_objects},
          {"overwrite of fixed names in objects", saved_image(staged), staged, &lapsed_objects}};
}

// The first element of the checkpoint; 0 if there is none. One that is not whole fails the test.
int64_t find_checkpoint(const std::shared_ptr<Storage>& storage) {
  const Location location(storage->child(kPlace));
  try {
    const Checkpoint checkpoint = Checkpoint::open(location);
    EXPECT_TRUE(checkpoint.verify().ok());
    const int64_t first = step_of(checkpoint).as_int();
    expect_rows(location, first, kRanks);
    return first;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    return 0;
  }
}

// Returns what was found. Every third time a later save follows, which takes the longest.
int64_t judge(const Scenario& scenario, const FileImage& image, uint64_t number) {
  const auto storage = scenario.make(image);
  const int64_t found = find_checkpoint(storage);
  EXPECT_TRUE(found == kNew || found == (scenario.before.empty() ? 0 : kOld)) << found;
  if (number % 3 != 0 || testing::Test::HasFailure()) return found;
  Saving(scenario.kind, kLater, one_client(storage)).run();
  EXPECT_EQ(find_checkpoint(storage), kLater);
  for (const std::string& name : storage->list()) {
    EXPECT_TRUE(name.starts_with(kPlace + "/")) << name;
  }
  return found;
}

// `ended`: whether the save has thrown nothing.
std::shared_ptr<FaultDisk> save_on(const Scenario& scenario, const FaultHook& hook,
                                   bool* ended = nullptr) {
  auto disk = FaultDisk::create(scenario.make(scenario.before), hook);
  bool failed = false;
  try {
    Saving(scenario.kind, kNew, [&](int rank) { return disk->storage(rank); }).run();
  } catch (const Error&) {
    failed = true;
  }
  if (ended != nullptr) *ended = !failed;
  return disk;
}

struct Counts {
  uint64_t points = 0, old = 0, made = 0;
};

class CrashPointsOfTransaction : public testing::TestWithParam<size_t> {
 protected:
  // The log would report every simulated crash.
  CrashPointsOfTransaction() : level_(set_log_level(LogLevel::kOff)) {}
  ~CrashPointsOfTransaction() override { set_log_level(level_); }
  static void TearDownTestSuite() {
    std::printf("[          ] %lu crash points of a transaction in all\n",
                static_cast<unsigned long>(total_));
  }
  static inline uint64_t total_ = 0;

 private:
  LogLevel level_;
};

TEST_P(CrashPointsOfTransaction, ACrashAtAnyCallLeavesTheOldCheckpointOrTheNewOne) {
  const Scenario scenario = scenarios()[GetParam()];
  SCOPED_TRACE(scenario.name);
  Counts counts;
  counts.points = crash_everywhere([&](const FaultHook& hook) { return save_on(scenario, hook); },
                                   [&](const FileImage& image, uint64_t number) {
                                     const int64_t found = judge(scenario, image, number);
                                     ++(found == kNew ? counts.made : counts.old);
                                   },
                                   kStride);
  std::printf("[          ] %s: %lu crash points, the new checkpoint at %lu\n", scenario.name,
              static_cast<unsigned long>(counts.points), static_cast<unsigned long>(counts.made));
  EXPECT_GT(counts.old, 0u);
  EXPECT_GT(counts.made, 0u);
  total_ += counts.points;
}

TEST_P(CrashPointsOfTransaction, ACallThatFailsOrComesLateLeavesTheOldCheckpointOrTheNewOne) {
  const Scenario scenario = scenarios()[GetParam()];
  SCOPED_TRACE(scenario.name);
  bool ended = false;
  Counts counts;
  counts.points =
      fail_everywhere([&](const FaultHook& hook) { return save_on(scenario, hook, &ended); },
                      [&](const FileImage& image, uint64_t number) {
                        const int64_t found = judge(scenario, image, number);
                        EXPECT_TRUE(!ended || found == kNew);
                        ++(found == kNew ? counts.made : counts.old);
                      },
                      kAnswerStride);
  std::printf("[          ] %s: %lu calls went wrong, the new checkpoint after %lu\n",
              scenario.name, static_cast<unsigned long>(counts.points),
              static_cast<unsigned long>(counts.made));
  EXPECT_GT(counts.old, 0u);
  EXPECT_GT(counts.made, 0u);
}

INSTANTIATE_TEST_SUITE_P(All, CrashPointsOfTransaction, testing::Range<size_t>(0, 9));

TEST(Transaction, EachStepMayComeFromAnotherThread) {
  const auto storage = memory_storage(saved_image({}));
  Saving saving({}, kNew, one_client(storage));
  std::vector<int64_t> found;
  for (const auto& step : saving.steps()) {
    std::thread(step).join();
    found.push_back(find_checkpoint(storage));
  }
  EXPECT_EQ(found, (std::vector<int64_t>{kOld, kOld, kOld, kOld, kNew, kNew}));
}

}  // namespace tilestone::crash_points_of_transaction_test
