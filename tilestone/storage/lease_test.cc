#include "tilestone/storage/lease.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <set>
#include <string>
#include <thread>

#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::lease_test {

constexpr auto kPeriod = MemoryObjects::kLeasePeriod;

bool is_had(StorageClaim& lock) { return !lock.held_until(Deadline::never()).expired(); }

TEST(Lease, EachRenewalHasAnotherTag) {
  const auto store = memory_objects();
  const auto lock = store->claim("lock");
  std::set<std::string> tags;
  while (tags.size() < 4) {
    tags.insert(store->stat("lock")->tag);
    std::this_thread::sleep_for(kPeriod / 4);
  }
  EXPECT_TRUE(is_had(*lock));
}

// The put is executed, then or later, and its answer is lost: the object's text says whose it is.
TEST(Lease, ARenewalWhoseAnswerIsLostLosesNoClaim) {
  for (const FaultAction& action :
       {FaultAction::fail(EIO), FaultAction::fail_after(EIO), FaultAction::fail_late(EIO, 1),
        FaultAction::fail_late(EIO, 3), FaultAction::fail_late(EIO, 4)}) {
    std::atomic<int> puts = 0;
    const auto disk = FaultDisk::create(memory_objects(), [&](const StorageCall& call) {
      return call.op == StorageOp::kPut && ++puts == 2 ? action : FaultAction::pass();
    });
    auto lock = claim_lease(disk->storage(), "lock", kPeriod, Deadline::never());
    while (puts < 4) std::this_thread::sleep_for(kPeriod / 4);
    EXPECT_TRUE(is_had(*lock));
    lock.reset();
    EXPECT_TRUE(disk->storage()->list().empty());
  }
}

// The store can't be reached for longer than a lease lasts: nobody has taken it over meanwhile.
TEST(Lease, AClaimThatLapsedIsHadAgainWhenItIsRenewed) {
  std::atomic<bool> is_cut = false;
  const auto memory = memory_objects();
  const auto disk = FaultDisk::create(memory, [&](const StorageCall&) {
    return is_cut ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  const auto lock = claim_lease(disk->storage(), "lock", kPeriod, Deadline::never());
  is_cut = true;
  std::this_thread::sleep_for(5 * kPeriod);
  EXPECT_FALSE(is_had(*lock));
  EXPECT_FALSE(is_leased(*memory, "lock", kPeriod));
  is_cut = false;
  EXPECT_TRUE(is_had(*lock));
  is_cut = true;
  std::this_thread::sleep_for(5 * kPeriod);
  const auto other = claim_lease(memory, "lock", kPeriod, Deadline::never());
  EXPECT_NE(other, nullptr);
  is_cut = false;
  EXPECT_FALSE(is_had(*lock));
  EXPECT_TRUE(is_had(*other));
}

TEST(Lease, OfManyWhoTakeOverOneHasTheClaim) {
  const auto store = memory_objects();
  put_file(*store, "lock", as_bytes("of a dead process"));
  std::atomic<int> count = 0;
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<StorageClaim>> locks(8);
  for (auto& lock : locks) threads.emplace_back([&] { lock = store->claim("lock"); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& lock : locks) count += lock != nullptr ? 1 : 0;
  EXPECT_EQ(count, 1);
}

TEST(Lease, AForkedChildHasNoClaimAndItsEndTakesNoneAway) {
  const auto store = memory_objects();
  auto lock = store->claim("lock");
  const pid_t child = ::fork();
  if (child == 0) {
    const bool has = is_had(*lock);
    lock.reset();
    ::_exit(has ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(is_had(*lock));
}

// A store whose answers say no ages, or whose clocks differ by an hour.
class OtherAges : public MemoryObjects {
 public:
  explicit OtherAges(bool has_ages) : MemoryObjects({}), has_ages_(has_ages) {}
  std::optional<FileInfo> stat(const std::string& name) override {
    auto info = MemoryObjects::stat(name);
    if (!info) return info;
    if (!has_ages_) info->least_age.reset();
    if (has_ages_) *info->least_age += 3600;
    return info;
  }

 private:
  const bool has_ages_;
};

TEST(Lease, WithoutAgesAndWithWrongOnesADeadOneIsTakenOverAndALivingOneIsNot) {
  for (const bool has_ages : {false, true}) {
    const std::shared_ptr<Storage> store = std::make_shared<OtherAges>(has_ages);
    put_file(*store, "lock", as_bytes("of a dead process"));
    EXPECT_EQ(is_leased(*store, "lock", kPeriod), !has_ages);
    const auto began = std::chrono::steady_clock::now();
    const auto lock = store->claim("lock");
    ASSERT_NE(lock, nullptr);
    EXPECT_GE(std::chrono::steady_clock::now() - began, (has_ages ? 1 : 4) * kPeriod);
    EXPECT_EQ(store->claim("lock"), nullptr);
    EXPECT_TRUE(is_had(*lock));
  }
}

TEST(Lease, WithoutAgesADeadOneIsKnownOnceItWasWatchedForFourPeriods) {
  OtherAges store(false);
  put_file(store, "lock", as_bytes("of a dead process"));
  const auto began = std::chrono::steady_clock::now();
  while (is_leased(store, "lock", kPeriod)) std::this_thread::sleep_for(kPeriod / 4);
  EXPECT_GE(std::chrono::steady_clock::now() - began, 4 * kPeriod);
}

// As a store's that is dead in the middle of a claim.
TEST(Lease, WhoWaitsForOneEndsAtHisDeadline) {
  const std::shared_ptr<Storage> store = std::make_shared<OtherAges>(false);
  put_file(*store, "lock", as_bytes("of a dead process"));
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(store->claim("lock", Deadline::after(kPeriod)), nullptr);
  EXPECT_LT(std::chrono::steady_clock::now() - began, 4 * kPeriod);
}

size_t threads_now() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

TEST(Lease, AClaimThatIsTakenWhileOthersAreReleasedIsRenewed) {
  const auto store = memory_objects();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const std::string name = "lock" + std::to_string(i);
      for (int round = 0; round < 50; ++round) store->claim(name);
      const auto last = store->claim(name);
      const std::string tag = store->stat(name)->tag;
      while (store->stat(name)->tag == tag) std::this_thread::sleep_for(kPeriod / 4);
      EXPECT_TRUE(is_had(*last));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Lease, AThreadRunsOnlyWhileAClaimIsHeld) {
  const auto store = memory_objects();
  const size_t before = threads_now();
  auto one = store->claim("one"), two = store->claim("two");
  EXPECT_EQ(threads_now(), before + 2);
  one.reset();
  EXPECT_EQ(threads_now(), before + 1);
  two.reset();
  EXPECT_EQ(threads_now(), before);
  one = store->claim("one");
  EXPECT_TRUE(is_had(*one));
}

}  // namespace tilestone::lease_test
