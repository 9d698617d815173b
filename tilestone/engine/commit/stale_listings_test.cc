// Listings that lag, as of a file server's client that has cached a directory: they show a step as
// it was at any moment of its save, which has ended since then. Whatever reads them finds the step,
// or says that there is none; nobody removes files of the checkpoint that stands.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/unpublished.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::stale_listings_test {

constexpr const char* kStep = "step-00000007";
constexpr int64_t kOld = 100, kNew = 500, kLater = 900;

void save_step(const std::shared_ptr<Storage>& run, int64_t first, bool overwrite) {
  SaveOptions options;
  options.overwrite = overwrite;
  options.resources.threads = 1;
  save(row_state(0, 1, first), run->child(kStep), options);
}

void save_by_files(const std::shared_ptr<Storage>& run, int64_t first) {
  save(row_state(0, 1, first), run->child(kStep), by_files(0, 1));
}

// A run whose step was saved, over an earlier one or not, and what was there at each moment of that
// save.
struct Saved {
  std::shared_ptr<Storage> storage;
  std::vector<FileImage> moments;
};
Saved saved_step(std::shared_ptr<Storage> (*make)(FileImage), bool over, bool by_files) {
  Saved made{make({}), {}};
  if (over) save_step(made.storage, kOld, false);
  const auto disk = FaultDisk::create(made.storage, [&](const StorageCall&) {
    FileImage image = memory_image(*made.storage);
    if (made.moments.empty() || image != made.moments.back()) {
      made.moments.push_back(std::move(image));
    }
    return FaultAction::pass();
  });
  by_files ? save_by_files(disk->storage(), kNew) : save_step(disk->storage(), kNew, over);
  return made;
}

// The first element of what stands; 0: nothing.
int64_t standing(const std::shared_ptr<Storage>& run) {
  try {
    const Location location(run->child(kStep));
    const Checkpoint checkpoint = Checkpoint::open(location);
    EXPECT_TRUE(checkpoint.verify().ok());
    const int64_t first = step_of(checkpoint).as_int();
    expect_rows(location, first, 1);
    return first;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound) << error.what();
    return 0;
  }
}

struct Work {
  const char* name;
  std::function<void(const std::shared_ptr<Storage>&)> run;
  int64_t leaves = kNew;  // if it ends without an error; else the step stands, or this
};

const std::vector<Work>& all_work() {
  static const std::vector<Work> all = {
      {"a reader", [](const auto& run) { standing(run); }},
      {"a save", [](const auto& run) { save_step(run, kLater, false); }, kLater},
      {"a save that replaces", [](const auto& run) { save_step(run, kLater, true); }, kLater},
      {"a save by files", [](const auto& run) { save_by_files(run, kLater); }, kLater},
      {"gc", [](const auto& run) { remove_leftovers(Location(run->child(kStep)), true); }},
      {"publish", [](const auto& run) { publish(Location(run->child(kStep))); }},
      {"remains of a run",
       [](const auto& run) { RunDirectory(Location(run)).remove_remains(100); }},
      {"a removal", [](const auto& run) { RunDirectory(Location(run)).remove(kStep); }, 0},
      {"the newest step",
       [](const auto& run) {
         const auto newest = RunDirectory(Location(run)).newest();
         EXPECT_TRUE(!newest || newest->step == 7);
       }},
  };
  return all;
}

TEST(StaleListings, LeaveWhoeverReadsThemAWholeStepOrNone) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  int tried = 0, refused = 0;
  for (const auto make : {&memory_storage, &memory_objects}) {
    for (const auto& [over, by_files] :
         {std::pair{false, false}, std::pair{true, false}, std::pair{false, true}}) {
      const Saved saved = saved_step(make, over, by_files);
      FileImage image = memory_image(*saved.storage);
      std::erase_if(image, [&](const auto& file) {
        return make == &memory_objects && file.first.ends_with("/.tilestone/lock");
      });
      ASSERT_EQ(standing(make(image)), kNew);
      for (size_t moment = 0; moment < saved.moments.size(); ++moment) {
        for (const Work& work : all_work()) {
          SCOPED_TRACE(std::string(work.name) + " at moment " + std::to_string(moment) +
                       (over ? " of a replacement" : " of a first save") +
                       (by_files ? " by files" : "") +
                       (make == &memory_objects ? ", objects" : ""));
          const auto storage = make(image);
          const auto disk = FaultDisk::create(storage);
          disk->lag_listings(saved.moments[moment]);
          ++tried;
          try {
            work.run(disk->storage());
          } catch (const Error&) {
            ++refused;
          }
          const int64_t stands = standing(storage);
          EXPECT_TRUE(stands == kNew || stands == work.leaves) << stands;
          if (HasFailure()) return;
        }
      }
    }
  }
  std::printf("[          ] %d tries, %d refused\n", tried, refused);
  EXPECT_GT(refused, 0);
  EXPECT_LT(refused, tried);
  set_log_level(level);
}

}  // namespace tilestone::stale_listings_test
