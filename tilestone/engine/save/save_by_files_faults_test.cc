// Saves without a communicator on a disk that fails at any call, and while other processes save,
// publish, clean and read.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "tilestone/base/error.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::save_by_files_faults_test {

constexpr int kRanks = 2;

constexpr uint64_t kStride = kReduced ? 7 : 1;
constexpr uint64_t kAnswerStride = 3 * kStride;
constexpr uint64_t kRounds = kReduced ? 20 : 60;

class SaveByFilesFaults : public testing::Test {
 protected:
  void SetUp() override { set_log_level(LogLevel::kOff); }
  void TearDown() override { set_log_level(LogLevel::kWarning); }
};

// Whether the checkpoint is published according to the rank's result; nullopt: it threw one of
// these errors.
std::optional<bool> save_rank(const std::shared_ptr<Storage>& storage, int rank, int64_t first,
                              const std::string& token = kToken) {
  try {
    return save(row_state(rank, kRanks, first), Location(storage), by_files(rank, kRanks, token))
        .published;
  } catch (const Error&) {
    return std::nullopt;
  }
}

void expect_whole(const std::shared_ptr<Storage>& storage, int64_t first) {
  expect_rows(Location(storage), first, kRanks);
  EXPECT_TRUE(Checkpoint::open(Location(storage)).verify().ok());
}

// Where the claims of who has died have lapsed.
std::shared_ptr<Storage> objects(FileImage image) {
  std::erase_if(image, [](const auto& file) { return file.first.ends_with(".claim"); });
  return memory_objects(std::move(image));
}

// The same ranks complete the save, or it has failed for all, and they complete one under another
// token.
void expect_completed(const std::shared_ptr<Storage>& storage, bool published) {
  if (published) expect_whole(storage, 3);
  const bool failed = engine::read_failed(*storage, engine::save_id_of(kToken, 0)).has_value();
  EXPECT_FALSE(published && failed);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(save_rank(storage, rank, 3).has_value(), !failed) << "rank " << rank;
    if (failed) save_rank(storage, rank, 3, "the next try of it");
  }
  expect_whole(storage, 3);
  remove_leftovers(Location(storage));
  EXPECT_TRUE(find_unpublished(Location(storage)).empty());
  expect_whole(storage, 3);
}

TEST_F(SaveByFilesFaults, WhicheverCallGoesWrongTheSameRanksCompleteTheSaveOrTheNext) {
  for (const auto make : {&memory_storage, &objects}) {
    bool published = false;
    const uint64_t points = fail_everywhere(
        [&](const FaultHook& hook) {
          const auto disk = FaultDisk::create(make({}), hook);
          published = false;
          for (int rank = 0; rank < kRanks; ++rank) {
            published |= save_rank(disk->storage(rank), rank, 3).value_or(false);
          }
          return disk;
        },
        [&](const FileImage& left, uint64_t) { expect_completed(make(left), published); },
        kAnswerStride);
    std::printf("[          ] %lu calls went wrong\n", static_cast<unsigned long>(points));
    EXPECT_GT(points, 100 / kAnswerStride);
  }
}

// The last rank dies after any call. It is restarted and publishes; then the power fails.
TEST_F(SaveByFilesFaults, WhatSomebodyElseHasBegunToPublishIsDurableOncePublished) {
  for (uint64_t at = 0;; at += kStride) {
    uint64_t calls = 0;
    const auto disk = FaultDisk::create(memory_storage(), [&](const StorageCall& call) {
      return call.client == 1 && calls++ == at ? FaultAction::die_after() : FaultAction::pass();
    });
    save_rank(disk->storage(0), 0, 3);
    const bool died = !save_rank(disk->storage(1), 1, 3);
    EXPECT_EQ(save_rank(disk->storage(2), 1, 3), true);
    const std::string manifest = manifest_name(engine::save_id_of(kToken, 0));
    for (const Survival survival : kAllSurvivals) {
      SCOPED_TRACE("call " + std::to_string(at) + ", " + std::string(to_string(survival)));
      const auto after = memory_storage(disk->surviving_image(survival, at));
      expect_whole(after, 3);
      EXPECT_TRUE(after->stat(manifest));
      if (HasFailure()) return;
    }
    if (!died && calls <= at) return;
  }
}

// Two runs, a save with a communicator, publishers, gc and a reader act in random order.
class Crowd {
 public:
  Crowd(uint64_t seed, bool abandons) : random_(seed), abandons_(abandons) {
    const auto delays = std::make_shared<std::mt19937_64>(seed);
    const auto mutex = std::make_shared<std::mutex>();
    disk_ = FaultDisk::create(inner_, [=](const StorageCall&) {
      std::lock_guard lock(*mutex);
      const uint64_t draw = (*delays)();
      if (draw % 8 != 0) return FaultAction::pass();
      return FaultAction::wait(std::chrono::microseconds(draw / 8 % 200));
    });
  }

  void run() {
    std::vector<std::function<void()>> all;
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int64_t first : {3, 4}) all.emplace_back([=, this] { rank_saves(rank, first); });
      all.emplace_back([=, this] { rank_saves(rank, 3); });  // a second process of the rank
    }
    for (int i = 0; i < 2; ++i) all.emplace_back([this] { publishes(); });
    all.emplace_back([this] { cleans(); });
    all.emplace_back([this] { reads(); });
    if (random_() % 2 == 0) all.emplace_back([this] { saves_together(); });
    if (abandons_) all.emplace_back([this] { abandons(); });
    std::shuffle(all.begin(), all.end(), random_);
    std::vector<std::thread> threads;
    for (const auto& work : all) threads.emplace_back(work);
    for (std::thread& thread : threads) thread.join();
    judge();
  }

 private:
  static std::string token(int64_t first) { return "run number " + std::to_string(first); }

  void told(int64_t first) {
    std::lock_guard lock(mutex_);
    told_.insert(first);
  }
  void rank_saves(int rank, int64_t first) {
    if (save_rank(disk_->storage(), rank, first, token(first)).value_or(false)) told(first);
  }
  void publishes() {
    for (int i = 0; i < 10; ++i) try_to([&] { publish(Location(disk_->storage())); });
  }
  void cleans() {
    for (int i = 0; i < 5; ++i) try_to([&] { remove_leftovers(Location(disk_->storage())); });
  }
  void abandons() {
    try_to([&] { abandon(Location(disk_->storage()), {.save_id = id(3), .period = 0}); });
  }
  void saves_together() {
    try_to([&] {
      save(row_state(0, kRanks, 5), Location(disk_->storage()));
      told(5);
    });
  }
  // A reader: what it finds is complete.
  void reads() {
    for (int i = 0; i < 10; ++i) {
      try {
        const Checkpoint checkpoint = Checkpoint::open(Location(disk_->storage()));
        EXPECT_TRUE(checkpoint.verify().ok());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
      }
    }
  }
  static std::string id(int64_t first) { return engine::save_id_of(token(first), 0); }
  // Any error is accepted here; the tests beside this one check which.
  static void try_to(const std::function<void()>& work) {
    try {
      work();
    } catch (const Error&) {
    }
  }

  // If a rank's result says that its save is published, that save's checkpoint exists. If no
  // checkpoint exists, a further run can be completed.
  void judge() {
    EXPECT_LE(told_.size(), 1u);
    if (!stands()) {
      EXPECT_TRUE(told_.empty());
      for (int rank = 0; rank < kRanks; ++rank) save_rank(inner_, rank, 6, token(6));
    }
    ASSERT_TRUE(stands());
    for (const int64_t first : told_) expect_content(first);
    try_to([&] { remove_leftovers(Location(inner_)); });
    EXPECT_TRUE(Checkpoint::open(Location(inner_)).verify().ok());
  }
  bool stands() const { return inner_->stat(".metadata").has_value(); }
  void expect_content(int64_t first) const {
    EXPECT_EQ(step_of(Checkpoint::open(Location(inner_))), Value(first));
  }

  const std::shared_ptr<Storage> inner_ = memory_storage();
  std::shared_ptr<FaultDisk> disk_;
  std::mt19937_64 random_;
  const bool abandons_;
  std::mutex mutex_;
  std::set<int64_t> told_;
};

TEST_F(SaveByFilesFaults, AmongManyRanksNoneReportsACheckpointThatDoesNotExist) {
  for (uint64_t seed = 0; seed < kRounds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Crowd(seed, seed % 2 == 1).run();
    if (HasFailure()) return;
  }
}

TEST_F(SaveByFilesFaults, EightPublishersAtOnceMakeOneCheckpoint) {
  for (uint64_t seed = 0; seed < kRounds / 10; ++seed) {
    const auto inner = memory_storage();
    const auto disk = FaultDisk::create(inner, [](const StorageCall& call) {
      // The last rank dies before it merges the receipts, so the publishers do the rest.
      const bool merges = call.client == 1 && call.op == StorageOp::kCreate &&
                          call.name.find("/merged.") != std::string_view::npos;
      if (merges) return FaultAction::die();
      return call.client == 2 ? FaultAction::wait(std::chrono::microseconds(call.index % 7 * 20))
                              : FaultAction::pass();
    });
    for (int rank = 0; rank < kRanks; ++rank) save_rank(disk->storage(rank), rank, 3);
    std::atomic<int> published = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&] {
        try {
          publish(Location(disk->storage(2)));
          ++published;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(published, 1);
    expect_whole(inner, 3);
    EXPECT_TRUE(find_leftovers(Location(inner)).empty());
    if (HasFailure()) return;
  }
}

}  // namespace tilestone::save_by_files_faults_test
