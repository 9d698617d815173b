// Draining to a run's directory of which calls fail, lose their answer, come late or are the last
// ones of the machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/fast_tier/drains_internal.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::drains_test {

using engine::Drains;
using engine::FastOptions;
using engine::HostFolder;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kRanks = 2;
constexpr int64_t kFirst = 3;

// A step that is whole on the hosts of its ranks, and waits.
struct Kept {
  std::string save_id;
  std::vector<HostFolder> hosts;
};

Kept kept_step(const Lineage& lineage = {}) {
  Kept made;
  const auto saved = memory_storage();
  run_ranks(kRanks, [&](const Communicator& comm) {
    SaveOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    options.attributes = to_attributes(lineage);
    const SaveResult result = save(row_state(comm, kFirst), Location(saved), options);
    if (comm.is_coordinator()) made.save_id = result.save_id;
  });
  engine::KeptIndex index;
  index.manifest = read_file(*saved, manifest_name(made.save_id), 1u << 20);
  const Manifest manifest = Manifest::decode(index.manifest, "manifest");
  index.about.step = 1;
  index.about.attributes = to_attributes(lineage);
  index.about.save_id = made.save_id;
  index.about.drains = true;
  index.about.manifest_size = index.manifest.size();
  for (const IndexSum& each : manifest.index) {
    index.about.index.push_back({each.name, each.role, false, each.size});
    index.files.push_back(read_file(*saved, each.name, each.size));
  }
  for (const Receipt& receipt : manifest.receipts) {
    index.about.files.insert(index.about.files.end(), receipt.files.begin(), receipt.files.end());
  }
  for (const Receipt& receipt : manifest.receipts) {
    const HostFolder host(memory_storage());
    const std::string name = HostFolder::folder_of(1, made.save_id);
    for (const ReceiptFile& file : receipt.files) {
      const auto copy = host.at(name)->create(file.name);
      copy->append(read_file(*saved, file.name, file.size));
      copy->sync(Deadline::never());
      copy->close();
    }
    host.keep(name, index, Deadline::never());
    made.hosts.push_back(host);
  }
  return made;
}

FastOptions quick() {
  FastOptions options;
  options.patience = std::chrono::seconds(30);
  options.first_wait = std::chrono::milliseconds(1);
  return options;
}

// What a start of the run does with the step: until it is drained, or the machine has died.
// Returns the warnings.
std::vector<std::string> drain(const Kept& kept, FaultDisk& disk) {
  const LoggedWarnings warnings;
  run_ranks(kRanks, [&](const Communicator& comm) {
    Drains drains(RunDirectory(Location(disk.storage(comm.rank()))),
                  kept.hosts[static_cast<size_t>(comm.rank())], quick(), [](uint64_t) {});
    const auto ended = std::make_shared<Pending::State>("draining", Deadline::never());
    drains.add(1, kept.save_id, ended);
    auto working = std::async(std::launch::async, [&] { drains.work(comm, true); });
    while (working.wait_for(std::chrono::microseconds(200)) != std::future_status::ready) {
      if (disk.crashed()) drains.stop();
    }
    working.get();
    if (disk.crashed()) return drains.leave();
    EXPECT_NO_THROW(Pending(ended).get(Deadline::after(std::chrono::seconds(0)), 0));
  });
  return warnings.texts();
}

// The run's directory shows nothing of the step, or all of it.
bool shows_the_step(const std::shared_ptr<Storage>& disk) {
  const RunDirectory run{Location(disk)};
  const auto found = run.find(1);
  if (!found || found->state == StepState::kUnfinished) return false;
  const Location step = run.at(found->name);
  expect_rows(step, kFirst, kRanks);
  EXPECT_TRUE(Checkpoint::open(step).verify().ok());
  return true;
}

TEST(DrainWithFaults, AStepIsDrainedWhicheverCallFailsOrComesLate) {
  const Kept kept = kept_step();
  const auto whole = FaultDisk::create(memory_storage());
  drain(kept, *whole);
  for (const FaultAction action :
       {FaultAction::fail(EIO), FaultAction::fail_after(EIO), FaultAction::fail_late(EIO, 4)}) {
    for (uint64_t faulty = 0; faulty < whole->calls(); ++faulty) {
      SCOPED_TRACE(faulty);
      const auto inner = memory_storage();
      const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
        return call.index == faulty ? action : FaultAction::pass();
      });
      drain(kept, *disk);
      disk->execute_late();
      EXPECT_TRUE(shows_the_step(inner));
    }
  }
}

TEST(DrainWithFaults, AStepIsDrainedByTheNextStartWhereverTheMachineDies) {
  const Kept kept = kept_step();
  crash_everywhere(
      [&](const FaultHook& hook) {
        auto disk = FaultDisk::create(memory_storage(), hook);
        drain(kept, *disk);
        return disk;
      },
      [&](const FileImage& left, uint64_t) {
        const auto next = FaultDisk::create(memory_storage(left));
        shows_the_step(next->storage());
        drain(kept, *next);
        EXPECT_TRUE(shows_the_step(next->storage()));
      });
}

TEST(Drain, OfASaveThatReplacesOneThatItDoesNotContinueSaysWhich) {
  const auto disk = FaultDisk::create(memory_storage());
  const Kept first = kept_step({.run = "r", .ordinal = 1});
  EXPECT_THAT(drain(first, *disk), IsEmpty());
  const Kept again = kept_step({.run = "r", .ordinal = 2, .parent = StepId{1, first.save_id}});
  EXPECT_THAT(drain(again, *disk), IsEmpty());
  const Kept other = kept_step({.run = "r", .ordinal = 3, .parent = StepId{1, first.save_id}});
  EXPECT_THAT(drain(other, *disk),
              ElementsAre(AllOf(HasSubstr("step 1 in "), HasSubstr("the save " + again.save_id),
                                HasSubstr("the later save " + other.save_id))));
  EXPECT_TRUE(shows_the_step(disk->storage()));
}

TEST(DrainWithFaults, ARankThatHasMissedTheEndHearsOfItInTheNextTry) {
  const Kept kept = kept_step();
  const auto disk = memory_storage();
  run_ranks(kRanks, [&](const Communicator& comm) {
    const auto rank = static_cast<size_t>(comm.rank());
    Drains drains(RunDirectory(Location(disk)), kept.hosts[rank], quick(), [](uint64_t) {});
    for (const int from : {0, 1}) {  // the second time only rank 1 waits
      const auto ended = std::make_shared<Pending::State>("draining", Deadline::never());
      if (comm.rank() >= from) drains.add(1, kept.save_id, ended);
      drains.work(comm, true);
      EXPECT_TRUE(drains.waiting().empty());
      drains.leave();
      if (comm.rank() < from) continue;
      EXPECT_NO_THROW(Pending(ended).get(Deadline::after(std::chrono::seconds(0)), 0));
    }
  });
  EXPECT_TRUE(shows_the_step(disk));
}

TEST(DrainWithFaults, ARankThatTakesNoPartEndsTheTry) {
  const Kept kept = kept_step();
  const auto disk = FaultDisk::create(memory_storage());
  const LoggedWarnings quiet;
  std::promise<void> over;
  run_ranks(kRanks, [&](const Communicator& comm) {
    if (comm.rank() == 1) return over.get_future().wait();
    FastOptions options = quick();
    options.patience = std::chrono::milliseconds(200);
    Drains drains(RunDirectory(Location(disk->storage())), kept.hosts[0], options, [](uint64_t) {});
    const auto ended = std::make_shared<Pending::State>("draining", Deadline::never());
    drains.add(1, kept.save_id, ended);
    std::thread work([&] { drains.work(comm, true); });
    const Deadline patience = Deadline::after(std::chrono::seconds(30));
    while (!drains.is_stalled() && !patience.expired()) std::this_thread::yield();
    EXPECT_TRUE(drains.is_stalled());
    EXPECT_THAT(drains.waiting(), ElementsAre(1u));
    drains.stop();
    work.join();
    drains.leave();
    over.set_value();
  });
}

}  // namespace tilestone::drains_test
