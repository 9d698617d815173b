// The machine dies at every storage call of a save: before it, after it, in the middle of it; and
// of what was not synced, everything, nothing or any part survives. A fresh reader must find the
// previous checkpoint or the new one, whole, and a later save must succeed.
#include <gtest/gtest.h>

#include "tilestone/base/log.h"
#include "tilestone/comm/threads.h"
#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage.h"

namespace tilestone {
namespace {

constexpr int64_t kOld = 100;  // what the standing checkpoint counts from
constexpr int64_t kNew = 500;
constexpr int64_t kLater = 900;

// Crashes are told in the log; here they are the point.
struct Quiet {
  LogLevel before = set_log_level(LogLevel::kOff);
  ~Quiet() { set_log_level(before); }
};

struct Scenario {
  const char* name;
  FileImage before;
  int ranks = 2;
  bool old_stands = false;
};

void save_rows(const Communicator& comm, const std::shared_ptr<Storage>& storage, int64_t first,
               bool overwrite) {
  SaveOptions options;
  options.comm = comm;
  options.overwrite = overwrite;
  options.buffer_bytes = 1u << 20;
  options.timeout = 60;
  save(row_state(comm, first), Location(storage), options);
}

FileImage saved_image(int ranks, int64_t first) {
  const auto storage = memory_storage();
  run_ranks(ranks, [&](Communicator comm) { save_rows(comm, storage, first, false); });
  return memory_image(*storage);
}

// Files of a save that wrote all its data and was killed before it published.
FileImage failed_attempt() {
  FileImage image = saved_image(3, kOld);
  image.erase(".metadata");
  return image;
}

std::shared_ptr<FaultDisk> save_on(const Scenario& scenario, const FaultHook& hook) {
  const auto disk = FaultDisk::create(memory_storage(scenario.before), hook);
  run_ranks_collect(scenario.ranks, [&](Communicator comm) {
    save_rows(comm, disk->storage(comm.rank()), kNew, scenario.old_stands);
  });
  return disk;
}

// The `first` of the checkpoint in the image, 0: there is none. Anything but a whole checkpoint is
// a failure of the test.
int64_t find_checkpoint(const std::shared_ptr<Storage>& storage) {
  try {
    OpenOptions options;
    options.threads = 1;
    options.buffer_bytes = 1u << 20;
    const Checkpoint checkpoint = Checkpoint::open(Location(storage), options);
    const int64_t first = checkpoint.read_object("step").as_int();
    const VerifyReport report = checkpoint.verify();
    EXPECT_TRUE(report.ok()) << report.damages.front().problem;
    const auto rows = static_cast<int>(checkpoint.metadata().find_tensor("w")->shape[0]);
    expect_rows(Location(storage), first, rows);
    return first;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    return 0;
  }
}

void judge(const Scenario& scenario, const FaultDisk& disk, Survival survival, uint64_t seed) {
  SCOPED_TRACE(std::string(to_string(survival)) + ", seed " + std::to_string(seed));
  const auto storage = memory_storage(disk.surviving_image(survival, seed));
  const int64_t found = find_checkpoint(storage);
  const int64_t old = scenario.old_stands ? kOld : 0;
  EXPECT_TRUE(found == old || found == kNew) << "found " << found;
  if (seed % 4 != 0) return;  // a later save costs more than all the rest
  save_rows(Communicator(), storage, kLater, found != 0);
  EXPECT_EQ(find_checkpoint(storage), kLater);
}

uint64_t crash_everywhere(const Scenario& scenario, uint64_t seeds) {
  const Quiet quiet;
  SCOPED_TRACE(scenario.name);
  const uint64_t calls = save_on(scenario, {})->calls();
  uint64_t points = 0;
  for (uint64_t k = 0; k < calls; ++k) {
    const FaultAction actions[] = {FaultAction::crash(), FaultAction::crash_after(),
                                   FaultAction::crash_torn(k * 37 % 1500)};
    for (const FaultAction& action : actions) {
      SCOPED_TRACE("call " + std::to_string(k));
      const auto disk = save_on(scenario, [&](const StorageCall& call) {
        return call.index == k ? action : FaultAction::pass();
      });
      for (Survival survival : kAllSurvivals) {
        const bool random = survival == Survival::kRandom || survival == Survival::kTorn512 ||
                            survival == Survival::kTorn4096;
        for (uint64_t seed = 0; seed < (random ? seeds : 1); ++seed, ++points) {
          judge(scenario, *disk, survival, seed);
        }
      }
      if (testing::Test::HasFailure()) return points;
    }
  }
  std::printf("[          ] %s: %lu calls, %lu crash points\n", scenario.name,
              static_cast<unsigned long>(calls), static_cast<unsigned long>(points));
  return points;
}

constexpr uint64_t kSeeds = 90;  // makes the three scenarios 100,000 points

TEST(CrashPoints, FirstSave) {
  EXPECT_GT(crash_everywhere({"first save", {}, 2, false}, kSeeds), 1000u);
}

TEST(CrashPoints, Overwrite) {
  EXPECT_GT(crash_everywhere({"overwrite", saved_image(2, kOld), 2, true}, kSeeds), 1000u);
}

TEST(CrashPoints, RetryAfterAFailedAttempt) {
  EXPECT_GT(crash_everywhere({"retry", failed_attempt(), 2, false}, kSeeds), 1000u);
}

}  // namespace
}  // namespace tilestone
