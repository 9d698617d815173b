#include "tilestone/storage/crashes_testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace tilestone {
namespace {

// Where and how the machine dies, at the `number`-th call of a client that changes the disk, or a
// call goes wrong, at the `number`-th of all.
struct Crash {
  int client = 0;
  uint64_t number = 0;
  FaultAction action;
  std::string what = {};
};

bool leaves_a_change(StorageOp op) { return changes_storage(op) && op != StorageOp::kClose; }

// The crashes that leave something different, in the order of the calls.
class Crashes {
 public:
  // Records a call of the work that runs to its end.
  FaultAction add(const StorageCall& call) {
    if (!leaves_a_change(call.op)) return FaultAction::pass();
    const std::lock_guard lock(mutex_);
    const uint64_t number = calls_[call.client]++;
    if (crashes_.empty()) crashes_.push_back({call.client, number, FaultAction::crash()});
    if (call.op == StorageOp::kAppend && call.size > 1) {
      const uint64_t keep = 1 + crashes_.size() * 37 % (call.size - 1);
      crashes_.push_back({call.client, number, FaultAction::crash_torn(keep)});
    }
    crashes_.push_back({call.client, number, FaultAction::crash_after()});
    return FaultAction::pass();
  }
  const std::vector<Crash>& all() const { return crashes_; }

 private:
  std::mutex mutex_;
  std::map<int, uint64_t> calls_;
  std::vector<Crash> crashes_;
};

std::shared_ptr<FaultDisk> run_into(const Crash& crash, const CrashedWork& work) {
  return work(
      [&crash, number = std::make_shared<std::atomic<uint64_t>>()](const StorageCall& call) {
        const bool counts = call.client == crash.client && leaves_a_change(call.op);
        return counts && (*number)++ == crash.number ? crash.action : FaultAction::pass();
      });
}

bool leaves_a_choice(Survival survival) {
  return survival == Survival::kRandom || survival == Survival::kTorn512 ||
         survival == Survival::kTorn4096;
}

}  // namespace

uint64_t crash_everywhere(const CrashedWork& work, const CrashJudge& judge, uint64_t stride,
                          uint64_t seeds) {
  uint64_t judged = 0;
  const auto judge_all = [&](const FaultDisk& disk, uint64_t first_seed) {
    std::set<FileImage> images;
    for (const Survival survival : kAllSurvivals) {
      const uint64_t tried = leaves_a_choice(survival) ? seeds : 1;
      for (uint64_t seed = first_seed; seed < first_seed + tried; ++seed) {
        const auto [image, is_new] = images.insert(disk.surviving_image(survival, seed));
        if (!is_new) continue;
        SCOPED_TRACE(std::string(to_string(survival)) + ", seed " + std::to_string(seed));
        judge(*image, judged++);
        if (testing::Test::HasFailure()) return;
      }
    }
  };
  Crashes crashes;
  judge_all(*work([&](const StorageCall& call) { return crashes.add(call); }), 0);
  for (uint64_t at = 0; at < crashes.all().size() && !testing::Test::HasFailure(); at += stride) {
    const Crash& crash = crashes.all()[at];
    SCOPED_TRACE("crash " + std::to_string(at) + ", at change " + std::to_string(crash.number) +
                 " of client " + std::to_string(crash.client));
    judge_all(*run_into(crash, work), at * seeds);
  }
  return judged;
}

namespace {

struct Way {
  const char* name;
  FaultAction action;
  bool changes = false, late = false, twice = false;  // only of calls that can do so

  bool is_of(StorageOp op) const {
    if ((changes && !changes_storage(op)) || (late && !comes_late(op))) return false;
    return !twice || op != StorageOp::kExchangeDirectories;  // no file server has it
  }
};

const Way kWays[] = {{"fails", FaultAction::fail(EIO)},
                     {"is executed, but fails", FaultAction::fail_after(EIO), true},
                     {"is executed late", FaultAction::fail_late(EIO, 1), true, true},
                     {"is executed later", FaultAction::fail_late(EIO, 7), true, true},
                     {"is executed twice", FaultAction::repeat(), true, false, true}};

// Every way in which a call of the work can go wrong.
std::vector<Crash> failures_of(const CrashedWork& work) {
  std::mutex mutex;
  std::map<int, uint64_t> calls;
  std::vector<Crash> found;
  work([&](const StorageCall& call) {
    const std::lock_guard lock(mutex);
    const uint64_t number = calls[call.client]++;
    for (const Way& way : kWays) {
      if (!way.is_of(call.op)) continue;
      const std::string client = " of client " + std::to_string(call.client);
      found.push_back({call.client, number, way.action,
                       std::string(to_string(call.op)) + " " + std::string(call.name) + client +
                           ", call " + std::to_string(number) + ", " + way.name});
    }
    return FaultAction::pass();
  });
  return found;
}

}  // namespace

uint64_t fail_everywhere(const CrashedWork& work, const CrashJudge& judge, uint64_t stride) {
  if (::getenv("TILESTONE_EVERY_ANSWER") != nullptr) stride = 1;
  uint64_t judged = 0;
  const std::vector<Crash> failures = failures_of(work);
  for (uint64_t at = 0; at < failures.size() && !testing::Test::HasFailure(); at += stride) {
    const Crash& failure = failures[at];
    SCOPED_TRACE(failure.what);
    const auto number = std::make_shared<std::atomic<uint64_t>>();
    const auto disk = work([&failure, number](const StorageCall& call) {
      const bool is_it = call.client == failure.client && (*number)++ == failure.number;
      return is_it ? failure.action : FaultAction::pass();
    });
    disk->execute_late();
    judge(disk->surviving_image(Survival::kAll), judged++);
  }
  return judged;
}

}  // namespace tilestone
