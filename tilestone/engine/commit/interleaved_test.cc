// Two saves, a cleaning or a removal, and a reader at one place, whose storage calls follow one
// another in a random order: at each call one of them is drawn to go on. Two saves into an empty
// place need no lock, nor do two replacements where a put can ask for a tag.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::interleaved_test {

constexpr int kClients = 4;
constexpr const char* kStep = "step-00000001";
constexpr int64_t kOld = 100, kNew = 500, kOther = 900;

// Which of several threads, one for each client of a disk, goes on.
class Turns {
 public:
  explicit Turns(uint64_t seed) : random_(seed) {}

  // Returns when the client is drawn.
  void wait(int client) {
    std::unique_lock lock(mutex_);
    waiting_.push_back(client);
    draw();
    changed_.wait(lock, [&] { return next_ == client; });
    next_ = kNobody;
  }
  // Begins late: after as many turns as are drawn for it.
  void idle(int client) {
    uint64_t turns = 0;
    {
      const std::lock_guard lock(mutex_);
      turns = random_() % 150;
    }
    for (; turns > 0; --turns) wait(client);
  }
  // The client makes no more calls.
  void end() {
    const std::lock_guard lock(mutex_);
    --running_;
    draw();
  }

 private:
  static constexpr int kNobody = -1;

  void draw() {
    if (running_ == 0 || waiting_.size() < running_) return;
    const auto drawn = waiting_.begin() + static_cast<ptrdiff_t>(random_() % waiting_.size());
    next_ = *drawn;
    waiting_.erase(drawn);
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::vector<int> waiting_;
  size_t running_ = kClients;
  int next_ = kNobody;
};

struct Outcomes {
  int done = 0, ended = 0;
};
template <typename Work>
void take_part(Turns& turns, int client, Outcomes& outcomes, const Work& work) {
  turns.idle(client);
  try {
    work();
    ++outcomes.done;
  } catch (const Error& error) {
    const bool expected = error.code() == ErrorCode::kAlreadyExists ||
                          error.code() == ErrorCode::kNotFound ||
                          error.code() == ErrorCode::kUnsupported;  // a cleaning without locks
    EXPECT_TRUE(expected) << error.what();
    ++outcomes.ended;
  }
  turns.end();
}

enum class Place { kEmpty, kEmptyWithoutLocks, kCheckpoint, kNoObjects, kObjects };

struct Round {
  Outcomes first, second, cleaning, reading;
};

// What stands at the end is of one of the saves that did not fail.
void play(Place place, uint64_t seed, Round& round) {
  const bool exists = place == Place::kCheckpoint || place == Place::kObjects;
  const bool in_files = place != Place::kNoObjects && place != Place::kObjects;
  const auto memory = in_files ? memory_storage() : memory_objects();
  const auto save_at = [&](const std::shared_ptr<Storage>& storage, int64_t value) {
    SaveOptions options;
    options.overwrite = exists;
    options.resources.threads = 1;
    save(row_state(0, 1, value), storage->child(kStep), options);
  };
  const bool removes = seed % 2 == 0 && place != Place::kEmptyWithoutLocks;
  bool removed = false;
  if (exists) save_at(memory, kOld);
  Turns turns(seed);
  const auto disk = FaultDisk::create(memory, [&](const StorageCall& call) {
    turns.wait(call.client);
    const bool lacks = place == Place::kEmptyWithoutLocks && call.op == StorageOp::kLock;
    return lacks ? FaultAction::fail(ENOTSUP) : FaultAction::pass();
  });
  const Round before = round;
  std::vector<std::thread> threads;
  threads.emplace_back(
      [&] { take_part(turns, 0, round.first, [&] { save_at(disk->storage(0), kNew); }); });
  threads.emplace_back(
      [&] { take_part(turns, 1, round.second, [&] { save_at(disk->storage(1), kOther); }); });
  threads.emplace_back([&] {
    take_part(turns, 2, round.cleaning, [&] {
      if (removes) {
        const RunDirectory run(Location(disk->storage(2)));
        removed = run.remove(kStep) == Removed::kNow;
      } else {
        remove_leftovers(Location(disk->storage(2)->child(kStep)));
      }
    });
  });
  threads.emplace_back([&] {
    take_part(turns, 3, round.reading, [&] {
      const Checkpoint checkpoint = Checkpoint::open(Location(disk->storage(3)->child(kStep)));
      EXPECT_TRUE(checkpoint.verify().ok());
    });
  });
  for (std::thread& thread : threads) thread.join();
  const bool first = round.first.done > before.first.done;
  const bool second = round.second.done > before.second.done;
  EXPECT_TRUE(first || second || round.first.ended + round.second.ended > 0);
  EXPECT_FALSE(!exists && first && second && !removed);
  const Location location(memory->child(kStep));
  if ((removed || (!exists && !first && !second)) &&
      !engine::may_be_checkpoint(location.storage())) {
    return;
  }
  const Checkpoint checkpoint = Checkpoint::open(location);
  const int64_t stands = step_of(checkpoint).as_int();
  EXPECT_TRUE((first && stands == kNew) || (second && stands == kOther) ||
              (!first && !second && stands == kOld))
      << stands;
  expect_rows(location, stands, 1);
}

// Rounds at each place; $TILESTONE_ROUNDS asks for more.
uint64_t rounds() {
  const char* const asked = ::getenv("TILESTONE_ROUNDS");
  return asked == nullptr ? 12 : std::stoull(asked);
}

TEST(Interleaved, TwoSavesACleaningOrRemovalAndAReaderLeaveOneWholeCheckpoint) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  for (const Place place : {Place::kEmpty, Place::kEmptyWithoutLocks, Place::kCheckpoint,
                            Place::kNoObjects, Place::kObjects}) {
    Round round;
    for (uint64_t seed = 0; seed < rounds() && !HasFailure(); ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", place " +
                   std::to_string(static_cast<int>(place)));
      play(place, seed, round);
    }
    EXPECT_GT(round.first.done + round.second.done, 0);
    std::printf("[          ] saves: %d done, %d refused; readings: %d done, %d refused\n",
                round.first.done + round.second.done, round.first.ended + round.second.ended,
                round.reading.done, round.reading.ended);
  }
  set_log_level(level);
}

}  // namespace tilestone::interleaved_test
