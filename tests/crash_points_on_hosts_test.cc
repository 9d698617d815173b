// Saves to the hosts of their ranks, in which every machine crashes at any storage call, or each
// call goes wrong in each way. What is left is a step that is whole on its hosts or one that does
// not count, and the next save follows.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/on_hosts_internal.h"
#include "tilestone/storage/crashes_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone::crash_points_on_hosts_test {

using engine::HostFolder;

constexpr int kRanks = 2;
constexpr uint64_t kAnswerStride = 3;

HostFolder host_of(int rank, const std::shared_ptr<Storage>& hosts) {
  return HostFolder(hosts->child("host " + std::to_string(rank)));
}

// As a tier's, with a host for each rank.
class Step final : public engine::HostStep {
 public:
  Step(uint64_t step, HostFolder folder, Communicator comm)
      : HostStep(step, false), folder_(std::move(folder)), comm_(std::move(comm)) {}
  std::shared_ptr<Storage> storage(const std::string& save_id) override {
    return folder_.at(HostFolder::folder_of(step(), save_id));
  }
  void meet(const std::function<void(const Communicator&)>& work) override { work(comm_); }
  bool is_first_of_host(int) const override { return true; }
  void keep(const engine::KeptIndex& index, Deadline deadline) override {
    folder_.keep(HostFolder::folder_of(step(), index.about.save_id), index, deadline);
  }
  void kept(const std::string&) override {}
  void dropped(const std::string& save_id) noexcept override {
    folder_.remove(HostFolder::folder_of(step(), save_id));
  }
  void saved_straight(const Error&) override {}
  void failed(const Error&, bool) noexcept override {}

 private:
  const HostFolder folder_;
  const Communicator comm_;
};

// Whether every rank has saved.
bool save_to(const std::function<std::shared_ptr<Storage>(int)>& hosts, uint64_t step) {
  const auto run = memory_storage();
  const auto thrown = run_ranks_collect(kRanks, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    options.timeout = 60;
    options.step = std::make_shared<RunStep>();
    options.step->hosts =
        std::make_shared<Step>(step, host_of(comm.rank(), hosts(comm.rank())), comm);
    async_save(row_state(comm, static_cast<int64_t>(step)), Location(run), options).result();
  });
  EXPECT_TRUE(run->list().empty());
  return std::ranges::count(thrown, nullptr) == kRanks;
}

// The steps that count, each of them whole.
std::vector<uint64_t> steps_on(const std::shared_ptr<Storage>& hosts) {
  std::vector<Bytes> said;
  for (int rank = 0; rank < kRanks; ++rank) {
    said.push_back(engine::say_steps(host_of(rank, hosts).list(), rank));
  }
  std::vector<uint64_t> found;
  for (const engine::SaidStep& step : engine::united_steps(said)) {
    if (!step.is_whole()) continue;
    found.push_back(step.step);
    FileImage all;
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string folder = HostFolder::folder_of(step.step, step.save_id);
      const auto files = host_of(rank, hosts).at(folder);
      for (const std::string& name : files->list()) all[name] = read_file(*files, name, 1u << 20);
    }
    const auto whole = memory_storage(std::move(all));
    EXPECT_TRUE(Checkpoint::open(Location(whole)).verify().ok());
    expect_rows(Location(whole), static_cast<int64_t>(step.step), kRanks);
  }
  return found;
}

TEST(CrashesOfSavesToHosts, LeaveAStepThatIsWholeOrDoesNotCount) {
  const LogLevel level = set_log_level(LogLevel::kOff);
  bool ended = false;
  uint64_t whole = 0;
  const auto save_on = [&](const FaultHook& hook) {
    auto disk = FaultDisk::create(memory_storage(), hook);
    ended = save_to([&](int rank) { return disk->storage(rank); }, 1);
    return disk;
  };
  const auto check = [&](const FileImage& left, uint64_t) {
    const auto hosts = memory_storage(left);
    const std::vector<uint64_t> steps = steps_on(hosts);
    EXPECT_TRUE(!steps.empty() || !ended);
    whole += steps.size();
    EXPECT_TRUE(save_to([&](int) { return hosts; }, 2));
    EXPECT_EQ(steps_on(hosts).size(), steps.size() + 1);
    for (int rank = 0; rank < kRanks; ++rank) {
      const HostFolder host = host_of(rank, hosts);
      host.remove_leftovers();
      EXPECT_EQ(host.root()->list_directories().size(), host.list().size());
    }
    EXPECT_EQ(steps_on(hosts).size(), steps.size() + 1);
  };
  const uint64_t points = crash_everywhere(save_on, check);
  std::cout << points << " crash points in all, " << whole << " with the step\n";
  EXPECT_GT(whole, 0u);
  EXPECT_LT(whole, points);
  whole = 0;
  const uint64_t failures = fail_everywhere(save_on, check, kAnswerStride);
  std::cout << failures << " calls went wrong, " << whole << " with the step\n";
  EXPECT_GT(whole, 0u);
  EXPECT_LT(whole, failures);
  set_log_level(level);
}

}  // namespace tilestone::crash_points_on_hosts_test
