// A rank fails in each step of two-phase reading: every rank ends with the same typed error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>

#include "tilestone/comm/communicator.h"
#include "tilestone/comm/relay_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/state/device_memory_testing.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::exchange_failures_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kRanks = 3;

bool is_data(const StorageCall& call) {
  return call.name.find(".distcp") != std::string_view::npos;
}

LoadOptions loading_together(const Communicator& comm, double timeout = 60) {
  LoadOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.timeout = timeout;
  options.reading.two_phase = Reading::TwoPhase::kAlways;
  return options;
}

// "t" has 6 MiB, and every rank wants all of it: each rank owns a part, and there are several
// rounds.
constexpr int64_t kCommon = 6 << 18;

std::shared_ptr<Storage> save_common() {
  const auto storage = memory_storage();
  StateDict state;
  state["t"] = counting(DType::kFloat32, {kCommon});
  save(state, Location(storage));
  return storage;
}

StateDict common_template() {
  StateDict wanted;
  wanted["t"] = TensorView::without_data(DType::kFloat32, {kCommon});
  return wanted;
}

// Fails the n-th read that rank 1 makes of data files.
std::vector<std::string> fail_read_of_rank_1(int n) {
  const auto storage = save_common();
  std::atomic<int> reads = 0;
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    const bool counts = call.client == 1 && call.op == StorageOp::kRead && is_data(call);
    return counts && ++reads == n ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  const auto texts = failures(kRanks, [&](Communicator comm) {
    load(common_template(), Location(disk->storage(comm.rank())), loading_together(comm));
  });
  EXPECT_GE(reads, n);
  return texts;
}

TEST(FailingOwner, AReadInTheFirstRoundFailsAllAlike) {
  const auto texts = fail_read_of_rank_1(1);
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("Input/output error"), HasSubstr("rank 1"),
                                HasSubstr("key t"), HasSubstr(".distcp"))));
  EXPECT_THAT(texts, Each(texts[0]));
}

TEST(FailingOwner, AReadInALaterRoundFailsAllAlike) {
  const auto texts = fail_read_of_rank_1(20);
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("Input/output error"), HasSubstr("rank 1"),
                                HasSubstr("key t"), HasSubstr(".distcp"))));
}

TEST(FailingOwner, AFileThatCantBeOpenedFailsAllAlike) {
  const auto disk = FaultDisk::create(save_common(), [](const StorageCall& call) {
    const bool hit = call.client == 1 && call.op == StorageOp::kOpen && is_data(call);
    return hit ? FaultAction::fail(EACCES) : FaultAction::pass();
  });
  const auto texts = failures(kRanks, [&](Communicator comm) {
    load(common_template(), Location(disk->storage(comm.rank())), loading_together(comm));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("Permission denied"), HasSubstr("rank 1"),
                                HasSubstr("key t"), HasSubstr(".distcp"))));
}

TEST(FailingAsker, ATemplateThatDoesNotFitFailsAllAlike) {
  const auto storage = save_common();
  const auto texts = failures(kRanks, [&](Communicator comm) {
    StateDict wanted = common_template();
    if (comm.rank() == 2) wanted["u"] = TensorView::without_data(DType::kFloat32, {1});
    load(wanted, Location(storage), loading_together(comm));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("the tensor is not in the checkpoint"),
                                HasSubstr("key u"), HasSubstr("rank 2"))));
}

TEST(FailingAsker, ADeliveryThatFailsInAnyRoundFailsAllAlike) {
  const auto storage = save_common();
  for (const uint64_t good : {0, 5}) {  // 6 MiB in blocks of less than 1 MiB
    const auto texts = failures(kRanks, [&](Communicator comm) {
      StateDict wanted = common_template();
      if (comm.rank() == 2) {
        const auto device = LateDevice::create();
        device->fail_at = good;
        wanted["t"] = device->put(TensorView::allocate(DType::kFloat32, {kCommon}));
      }
      load(wanted, Location(storage), loading_together(comm));
    });
    EXPECT_EQ(texts[2], "the device is gone") << good;  // unchanged, as it was thrown
    for (const int rank : {0, 1}) {
      EXPECT_THAT(texts[static_cast<size_t>(rank)],
                  AllOf(HasSubstr("the device is gone"), HasSubstr("rank 2")))
          << good;
    }
  }
}

TEST(FailingOwner, ARankThatNeverLoadsIsNamed) {
  const auto storage = save_common();
  const auto texts = failures(kRanks, [&](Communicator comm) {
    if (comm.rank() == 2) return;
    load(common_template(), Location(storage), loading_together(comm));
  });
  for (int rank : {0, 1}) {
    EXPECT_THAT(texts[static_cast<size_t>(rank)], HasSubstr("rank 2"));
  }
}

TEST(FailingOwner, ARankThatHangsWhileReadingIsNamed) {
  const auto storage = save_common();
  std::atomic<bool> hung = false;
  const auto disk = FaultDisk::create(storage, [&](const StorageCall& call) {
    const bool hangs = call.client == 1 && call.op == StorageOp::kRead &&
                       call.name.find(".distcp") != std::string_view::npos && !hung.exchange(true);
    return hangs ? FaultAction::wait(std::chrono::milliseconds(2500)) : FaultAction::pass();
  });
  const auto texts = failures(kRanks, [&](Communicator comm) {
    load(common_template(), Location(disk->storage(comm.rank())), loading_together(comm, 2.0));
  });
  for (int rank : {0, 2}) {
    EXPECT_THAT(texts[static_cast<size_t>(rank)], HasSubstr("rank 1"));
  }
  EXPECT_FALSE(texts[1].empty());
}

// A rank whose communicator fails between two messages of the exchange.
class DyingComm final : public RelayComm {
 public:
  DyingComm(Communicator comm, int lives) : RelayComm(std::move(comm)), lives_(lives) {}
  std::vector<Bytes> gather(ByteView mine, Deadline deadline) override {
    live();
    return comm_.gather(mine, deadline);
  }
  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) override {
    live();
    return comm_.scatter(std::move(parts), deadline);
  }
  Bytes broadcast(ByteView mine, Deadline deadline) override {
    live();
    return comm_.broadcast(mine, deadline);
  }
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) override {
    if (--lives_ < 0) dead_ = true;
    live();
    return comm_.all_to_all(std::move(to), deadline);
  }

 private:
  void live() const {
    if (dead_) throw std::runtime_error("killed");
  }

  int lives_;
  bool dead_ = false;
};

TEST(FailingOwner, ARankThatLeavesInAnyStepIsNamed) {
  const auto storage = save_common();
  for (int step = 0; step < 6; ++step) {  // requests, verdicts, rounds
    const auto texts = failures(kRanks, [&](Communicator comm) {
      if (comm.rank() == 1) comm = Communicator(std::make_shared<DyingComm>(comm, step));
      load(common_template(), Location(storage), loading_together(comm));
    });
    for (int rank : {0, 2}) {
      EXPECT_THAT(texts[static_cast<size_t>(rank)], AllOf(HasSubstr("rank 1"), HasSubstr("killed")))
          << step;
    }
  }
}

}  // namespace tilestone::exchange_failures_test
