// A checkpoint is replaced while it is read, at each storage call of the reader.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::replaced_test {

using testing::HasSubstr;

constexpr int64_t kOld = 1;
constexpr int64_t kNew = 1000;
constexpr char kSaid[] = "another save may have replaced the checkpoint";

void save_rows(const std::shared_ptr<Storage>& storage, int64_t first) {
  run_ranks(2, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    options.overwrite = true;
    save(row_state(comm, first), storage, options);
  });
}

// A checkpoint that is replaced just before the reader's call number `at`.
class ReplacedAt {
 public:
  explicit ReplacedAt(uint64_t at) : memory_(memory_storage()) {
    save_rows(memory_, kOld);
    disk_ = FaultDisk::create(memory_, [this, at](const StorageCall& call) {
      if (call.index == at) {
        save_rows(memory_, kNew);
        reached_ = true;
      }
      return FaultAction::pass();
    });
  }

  Location location(int rank = 0) { return disk_->storage(rank); }
  bool reached() const { return reached_; }

 private:
  std::shared_ptr<Storage> memory_;
  std::shared_ptr<FaultDisk> disk_;
  std::atomic<bool> reached_ = false;
};

struct Outcomes {
  int old = 0, replaced = 0, reported = 0;

  void count(const std::vector<int64_t>& firsts, const std::vector<std::string>& texts) {
    for (const std::string& text : texts) EXPECT_EQ(text, texts.front()) << "ranks differ";
    if (!texts.front().empty()) {
      EXPECT_THAT(texts.front(), HasSubstr(kSaid));
      ++reported;
      return;
    }
    for (const int64_t first : firsts) EXPECT_EQ(first, firsts.front()) << "a mixture";
    ++(firsts.front() == kOld ? old : replaced);
  }
};

// `first` of the row_state() that was loaded; 0 if the values are not of one save.
int64_t first_of(const StateDict& loaded, int rank) {
  for (const int64_t first : {kOld, kNew}) {
    const TensorView& w = loaded.find("w")->get_if<ShardedTensor>()->data;
    const TensorView& p = *loaded.find("p")->get_if<TensorView>();
    if (elements(w) == elements(counting(DType::kFloat32, {1, 8}, first + 8 * rank)) &&
        elements(p) == elements(counting(DType::kInt64, {3}, first)) &&
        *loaded.find("step")->get_if<Value>() == Value(first)) {
      return first;
    }
  }
  return 0;
}

TEST(Replaced, ALoadGivesTheOldStateOrTheNewOnEveryRankOrSaysSo) {
  using TwoPhase = Reading::TwoPhase;
  for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
    Outcomes outcomes;
    for (uint64_t at = 0;; ++at) {
      SCOPED_TRACE("replaced at call " + std::to_string(at));
      ReplacedAt checkpoint(at);
      std::vector<int64_t> firsts(2);
      const auto texts = failures(2, [&](Communicator comm) {
        LoadOptions options;
        options.comm = comm;
        options.reading.two_phase = mode;
        const StateDict loaded =
            load(row_template(comm), checkpoint.location(comm.rank()), options);
        firsts[comm.rank()] = first_of(loaded, comm.rank());
        EXPECT_NE(firsts[comm.rank()], 0) << "a mixture";
      });
      if (!checkpoint.reached()) break;
      outcomes.count(firsts, texts);
    }
    EXPECT_GT(outcomes.old, 0);
    EXPECT_GT(outcomes.replaced, 0);
    EXPECT_GT(outcomes.reported, 0);
  }
}

TEST(Replaced, VerifyChecksTheOldOrTheNewCheckpointOrSaysSoAndFindsNoDamage) {
  Outcomes outcomes;
  for (uint64_t at = 0;; ++at) {
    SCOPED_TRACE("replaced at call " + std::to_string(at));
    ReplacedAt checkpoint(at);
    int64_t first = 0;
    const auto texts = failures(1, [&](Communicator) {
      const Checkpoint opened = Checkpoint::open(checkpoint.location());
      const VerifyReport report = opened.verify();
      EXPECT_TRUE(report.ok()) << report.damages.front().problem;
      EXPECT_EQ(report.items_without_checksum, 0u);
      first = opened.read_object("step") == Value(kOld) ? kOld : kNew;
    });
    if (!checkpoint.reached()) break;
    outcomes.count({first}, texts);
  }
  EXPECT_GT(outcomes.replaced, 0);
  EXPECT_GT(outcomes.reported, 0);
}

// Directories may hold many files of this and of other checkpoints, on a slow server.
TEST(Opening, ListsTheDirectoryAndItsOwnOnceAndNothingElse) {
  const auto memory = memory_storage();
  save_rows(memory, kOld);
  memory->directories()->make("users");
  std::vector<std::string> listed;
  std::mutex mutex;
  const auto disk = FaultDisk::create(memory, [&](const StorageCall& call) {
    std::lock_guard lock(mutex);
    if (call.op == StorageOp::kList) listed.emplace_back(call.name);
    return FaultAction::pass();
  });
  EXPECT_FALSE(Checkpoint::open(disk->storage()).keys().empty());
  EXPECT_EQ(listed, (std::vector<std::string>{".tilestone/", ""}));
}

}  // namespace tilestone::replaced_test
