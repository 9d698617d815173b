// Two-phase reading by way of the page cache, which ranks of one host share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tilestone/comm/threads.h"
#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kRanks = 4;
constexpr int64_t kRows = 512;
constexpr int64_t kColumns = 8192;
constexpr uint64_t kMatrixBytes = kRows * kColumns * 4;  // 16 MiB; a rank's part of a row is 8 KiB
constexpr uint64_t kLarge = 64u << 10;                   // bytes of a read that is no part of a row

Box rows_of(int rank) { return {{kRows / kRanks * rank, 0}, {kRows / kRanks, kColumns}}; }
Box columns_of(int rank) { return {{0, kColumns / kRanks * rank}, {kRows, kColumns / kRanks}}; }

// What the ranks ask a storage for, of data files.
struct Traffic {
  std::atomic<uint64_t> large = 0;  // bytes
  std::atomic<uint64_t> small = 0;
};

class PageCache : public testing::Test {
 protected:
  void SetUp() override {
    run_ranks(kRanks, [&](Communicator comm) {
      StateDict state;
      const Box rows = rows_of(comm.rank());
      state["w"] = ShardedTensor::from_box(
          "w", counting(DType::kFloat32, rows.shape, rows.offset[0] * kColumns), {kRows, kColumns},
          rows);
      SaveOptions options;
      options.comm = comm;
      save(state, Location(storage_), options);
    });
  }

  Location counted(Traffic& traffic) {
    const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
      if (call.op == StorageOp::kRead && call.name.find(".distcp") != std::string_view::npos) {
        (call.size >= kLarge ? traffic.large : traffic.small) += call.size;
      }
      return FaultAction::pass();
    });
    return Location(disk->storage());
  }

  // Loads this rank's box of the matrix and compares it.
  static void expect_box(const Communicator& comm, const Location& location, const Box& box) {
    const TensorView found = TensorView::allocate(DType::kFloat32, box.shape);
    StateDict wanted;
    wanted["w"] = ShardedTensor::from_box("w", found, {kRows, kColumns}, box);
    LoadOptions options;
    options.comm = comm;
    options.timeout = 120;
    options.buffer_bytes = 32u << 20;
    load(wanted, location, options);
    const TensorView all = counting(DType::kFloat32, {kRows, kColumns});
    EXPECT_TRUE(same_bytes(elements(found), elements(all.narrow(box))));
  }

  TempDirectory directory_;
  std::shared_ptr<Storage> storage_ = posix_storage(directory_.path());
};

TEST_F(PageCache, ColumnsOutOfRowsAreBroughtInOnceInLargeReads) {
  Traffic traffic;
  const Location location = counted(traffic);
  run_ranks(kRanks,
            [&](Communicator comm) { expect_box(comm, location, columns_of(comm.rank())); });
  EXPECT_EQ(traffic.large, kMatrixBytes);
  EXPECT_EQ(traffic.small, kMatrixBytes);
}

TEST_F(PageCache, WhatAllRanksWantIsBroughtInOnce) {
  Traffic traffic;
  const Location location = counted(traffic);
  run_ranks(kRanks,
            [&](Communicator comm) { expect_box(comm, location, Box::whole({kRows, kColumns})); });
  EXPECT_EQ(traffic.large, (1 + kRanks) * kMatrixBytes);
}

TEST_F(PageCache, WhatEachRankWantsForItselfIsReadByIt) {
  Traffic traffic;
  const Location location = counted(traffic);
  run_ranks(kRanks, [&](Communicator comm) {
    expect_box(comm, location, rows_of((comm.rank() + 1) % kRanks));
  });
  EXPECT_EQ(traffic.large, kMatrixBytes);
  EXPECT_EQ(traffic.small, 0u);
}

TEST_F(PageCache, RanksMayWantNothing) {
  Traffic traffic;
  const Location location = counted(traffic);
  run_ranks(kRanks, [&](Communicator comm) {
    const Box nothing{{0, 0}, {0, kColumns}};
    expect_box(comm, location, comm.rank() % 2 == 0 ? nothing : columns_of(comm.rank()));
  });
}

TEST_F(PageCache, AReadThatFailsAtOneRankFailsAtAll) {
  std::atomic<int> reads = 0;
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
    const bool prefetch = call.op == StorageOp::kRead && call.size >= kLarge &&
                          call.name.find(".distcp") != std::string_view::npos;
    return prefetch && ++reads == 5 ? FaultAction::fail(EIO) : FaultAction::pass();
  });
  const Location location(disk->storage());
  const auto texts = failures(
      kRanks, [&](Communicator comm) { expect_box(comm, location, columns_of(comm.rank())); });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("key w"), HasSubstr(".distcp"), HasSubstr("rank"))));
}

}  // namespace
}  // namespace tilestone
