// Two-phase reading through the page cache, which the ranks of one host share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::exchange_cache_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kRanks = 4;
constexpr int64_t kRows = 512;
constexpr int64_t kColumns = 8192;
constexpr uint64_t kMatrixBytes = kRows * kColumns * 4;  // 16 MiB; a rank's part of a row is 8 KiB
constexpr uint64_t kLarge = 64u << 10;  // bytes of a read that is larger than a part of a row

Box rows_of(int rank) { return {{kRows / kRanks * rank, 0}, {kRows / kRanks, kColumns}}; }
Box columns_of(int rank) { return {{0, kColumns / kRanks * rank}, {kRows, kColumns / kRanks}}; }

// A disk on which the range of the n-th large read of data can't be read, by that read or any later
// one.
class BadSector {
 public:
  explicit BadSector(int nth) : nth_(nth) {}

  FaultAction operator()(const StorageCall& call) {
    if (call.op != StorageOp::kRead || call.name.find(".distcp") == std::string_view::npos) {
      return FaultAction::pass();
    }
    const std::lock_guard lock(mutex_);
    if (call.size >= kLarge && ++reads_ == nth_) {
      name_ = call.name;
      begin_ = call.offset;
      end_ = call.offset + call.size;
    }
    const bool bad = call.name == name_ && call.offset < end_ && call.offset + call.size > begin_;
    return bad ? FaultAction::fail(EIO) : FaultAction::pass();
  }

 private:
  const int nth_;
  std::mutex mutex_;
  int reads_ = 0;
  std::string name_;
  uint64_t begin_ = 0, end_ = 0;
};

// Loads this rank's box of a tensor `w` of `shape`.
TensorView load_box(const Communicator& comm, const Location& location, DType dtype,
                    const Dims& shape, const Box& box) {
  const TensorView found = TensorView::allocate(dtype, box.shape);
  StateDict wanted;
  wanted["w"] = ShardedTensor::from_box("w", found, shape, box);
  LoadOptions options;
  options.comm = comm;
  options.timeout = 120;
  options.resources.buffer_bytes = 32u << 20;
  load(wanted, location, options);
  return found;
}

// The bytes that the process has read from files so far, from the disk or the page cache.
uint64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  uint64_t bytes = 0;
  while (io >> name >> bytes) {
    if (name == "rchar:") return bytes;
  }
  throw std::runtime_error("/proc/self/io has no rchar");
}

// The reads of data files that the ranks make.
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

  // Loads this rank's box of the matrix and compares its elements.
  static void expect_box(const Communicator& comm, const Location& location, const Box& box) {
    const TensorView found = load_box(comm, location, DType::kFloat32, {kRows, kColumns}, box);
    static const TensorView all = counting(DType::kFloat32, {kRows, kColumns});
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

// Ranks that want whole blocks check them themselves, so that nobody reads them a second time.
TEST_F(PageCache, WhatIsThereAlreadyIsReadOnceByEachRankThatWantsWholeBlocks) {
  const Location location(storage_);
  const Box last_rows{{kRows / kRanks - 1, 0}, {kRows - kRows / kRanks + 1, kColumns}};
  for (const Box& box : {Box::whole({kRows, kColumns}), last_rows}) {
    run_ranks(kRanks, [&](Communicator comm) { expect_box(comm, location, box); });
    const uint64_t before = bytes_read();
    run_ranks(kRanks, [&](Communicator comm) { expect_box(comm, location, box); });
    const uint64_t read = bytes_read() - before;
    const auto wanted = static_cast<uint64_t>(box.numel()) * 4 * kRanks;
    EXPECT_GE(read, wanted);
    EXPECT_LE(read, wanted + wanted / 16);
  }
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
  BadSector bad(5);
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) { return bad(call); });
  const Location location(disk->storage());
  const auto texts = failures(
      kRanks, [&](Communicator comm) { expect_box(comm, location, columns_of(comm.rank())); });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("key w"), HasSubstr(".distcp"), HasSubstr("rank"))));
}

TEST_F(PageCache, ARankThatCantPlanFailsAllAlike) {
  const auto texts = failures(kRanks, [&](Communicator comm) {
    const Dims shape = comm.rank() == 2 ? Dims{kRows, kColumns + 1} : Dims{kRows, kColumns};
    load_box(comm, Location(storage_), DType::kFloat32, shape, columns_of(comm.rank()));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("key w"), HasSubstr("rank 2"))));
  EXPECT_THAT(texts, Each(texts[0]));
}

// More data than an owner reads ahead of the ranks: 128 MiB, of which each owner has a quarter, 8
// MiB per round. A rank's part of a row is 8 KiB here too.
class ManyRounds : public testing::Test {
 protected:
  static constexpr int64_t kLongRows = 4096;
  static constexpr int64_t kLongColumns = 32768;
  static constexpr uint64_t kBytes = kLongRows * kLongColumns;

  void SetUp() override {
    run_ranks(kRanks, [&](Communicator comm) {
      const Box rows{{kLongRows / kRanks * comm.rank(), 0}, {kLongRows / kRanks, kLongColumns}};
      const TensorView tensor = TensorView::allocate(DType::kUInt8, rows.shape);
      for_each_row(rows, [&](int64_t at, ByteView row) {
        std::memcpy(tensor.data + at, row.data(), row.size());
      });
      StateDict state;
      state["w"] = ShardedTensor::from_box("w", tensor, {kLongRows, kLongColumns}, rows);
      SaveOptions options;
      options.comm = comm;
      save(state, Location(storage_), options);
    });
  }

  // Calls visit with each row's place in the box and its elements. An element is 31 × its row plus
  // an eighth of its column, modulo 256.
  template <typename Visit>
  static void for_each_row(const Box& box, const Visit& visit) {
    constexpr int64_t kPeriod = 8 * 256;  // columns
    static const Bytes long_row = [] {
      Bytes made(kPeriod + kLongColumns);
      for (size_t column = 0; column < made.size(); ++column) {
        made[column] = static_cast<std::byte>(column >> 3);
      }
      return made;
    }();
    for (int64_t row = 0; row < box.shape[0]; ++row) {
      const int64_t first = (box.offset[0] + row) * 31 * 8 % kPeriod + box.offset[1];
      visit(row * box.shape[1], ByteView(long_row).subspan(static_cast<size_t>(first),
                                                           static_cast<size_t>(box.shape[1])));
    }
  }

  // Returns how many rows of this rank's columns differ from what was saved.
  static int64_t load_columns(const Communicator& comm, const Location& location) {
    const int64_t width = kLongColumns / kRanks;
    const Box columns{{0, width * comm.rank()}, {kLongRows, width}};
    const TensorView found =
        load_box(comm, location, DType::kUInt8, {kLongRows, kLongColumns}, columns);
    int64_t wrong = 0;
    for_each_row(columns, [&](int64_t at, ByteView row) {
      wrong += !same_bytes(ByteView(found.data + at, row.size()), row);
    });
    return wrong;
  }

  TempDirectory directory_;
  std::shared_ptr<Storage> storage_ = posix_storage(directory_.path());
};

TEST_F(ManyRounds, EachByteIsBroughtInOnce) {
  std::atomic<uint64_t> large = 0;
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) {
    if (call.op == StorageOp::kRead && call.size >= kLarge && !call.name.starts_with(".")) {
      large += call.size;
    }
    return FaultAction::pass();
  });
  const Location location(disk->storage());
  for (const bool cached : {false, true}) {
    large = 0;
    run_ranks(kRanks, [&](Communicator comm) { EXPECT_EQ(load_columns(comm, location), 0); });
    EXPECT_EQ(large, kBytes) << (cached ? "from the cache" : "from the disk");
  }
}

TEST_F(ManyRounds, AFailureAheadOfTheReadingFailsAllRanks) {
  BadSector bad(100);
  const auto disk = FaultDisk::create(storage_, [&](const StorageCall& call) { return bad(call); });
  const Location location(disk->storage());
  const auto texts = failures(kRanks, [&](Communicator comm) { load_columns(comm, location); });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("key w"), HasSubstr(".distcp"), HasSubstr("rank"))));
}

}  // namespace tilestone::exchange_cache_test
