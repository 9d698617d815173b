// Every byte that a load reads is checked, also if it reads only parts of items.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/state/chunk_blocks.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::block_checks_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using TwoPhase = Reading::TwoPhase;

// Rows of 12,004 bytes: neither rows nor tiles of rows end where blocks end.
constexpr int64_t kRows = 300;
constexpr int64_t kColumns = 3001;
constexpr int kWriters = 2;

const TensorView& whole() {
  static const TensorView all = counting(DType::kFloat32, {kRows, kColumns});
  return all;
}

// A rank's part of dim `dim`, as equal as possible.
constexpr size_t kWhole = 2;  // not a dim: every rank's part is all

Box part_of(int rank, int ranks, size_t dim) {
  Box box = Box::whole({kRows, kColumns});
  if (dim == kWhole) return box;
  const int64_t count = box.shape[dim];
  box.offset[dim] = count * rank / ranks;
  box.shape[dim] = count * (rank + 1) / ranks - box.offset[dim];
  return box;
}

enum class Copies { kNone, kLocal };

// "w" by rows; with copies, every row is also in the file of a rank of the other replica.
void save_rows(const std::shared_ptr<Storage>& storage, Copies copies = Copies::kNone) {
  const bool twice = copies == Copies::kLocal;
  run_ranks(twice ? 2 * kWriters : kWriters, [&](Communicator comm) {
    const Box box = part_of(comm.rank() % kWriters, kWriters, 0);
    ShardedTensor w =
        ShardedTensor::from_box("w", counting(DType::kFloat32, box.shape, box.offset[0] * kColumns),
                                {kRows, kColumns}, box);
    w.replica_id = {comm.rank() / kWriters};
    StateDict state;
    state["w"] = w;
    SaveOptions options;
    options.comm = comm;
    options.timeout = 120;
    if (twice) {
      options.copies.emplace();
      options.copies->group = {0, 1, 2, 3};
    }
    save(state, Location(storage), options);
  });
}

LoadOptions loading(const Communicator& comm, TwoPhase mode) {
  LoadOptions options;
  options.comm = comm;
  options.resources.threads = 1;
  options.resources.buffer_bytes = 4u << 20;
  options.reading.two_phase = mode;
  options.timeout = 120;
  return options;
}

// Loads a rank's part of dim `dim` and returns whether it has the right elements.
bool loads_right(const Communicator& comm, const Location& location, size_t dim,
                 const LoadOptions& options) {
  const Box box = part_of(comm.rank(), comm.size(), dim);
  StateDict wanted;
  wanted["w"] = ShardedTensor::from_box("w", TensorView::without_data(DType::kFloat32, box.shape),
                                        {kRows, kColumns}, box);
  const StateDict loaded = load(wanted, location, options);
  return same_bytes(elements(loaded.get<ShardedTensor>("w").data), elements(whole().narrow(box)));
}

struct Layout {
  int ranks;
  size_t dim;
  TwoPhase mode;
};

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const int ranks : {1, 2, 4}) {
    for (const size_t dim : {size_t{0}, size_t{1}, kWhole}) {
      for (const TwoPhase mode : {TwoPhase::kAuto, TwoPhase::kAlways, TwoPhase::kNever}) {
        all.push_back({ranks, dim, mode});
      }
    }
  }
  return all;
}

// A directory on a disk, so that ranks exchange through the page cache with kAuto.
class Damaged : public testing::Test {
 protected:
  // Flips a bit of the file.
  void flip(const std::string& file, uint64_t at) {
    std::fstream bytes(directory_.path() + "/" + file,
                       std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(static_cast<std::streamoff>(at));
    const int byte = bytes.get();
    bytes.seekp(static_cast<std::streamoff>(at));
    bytes.put(static_cast<char>(byte ^ 16));
  }

  Metadata metadata() { return Checkpoint::open(Location(storage_)).metadata(); }

  // Positions in the payload of the first chunk of "w", as offsets in its file.
  std::vector<uint64_t> positions(const Metadata& metadata) {
    const auto t = static_cast<uint32_t>(metadata.find_tensor("w") - metadata.tensors.data());
    const auto blocks = blocks_of(metadata, t, 0);
    EXPECT_TRUE(blocks && blocks->expected.size() > 2);
    const uint64_t first = metadata.tensors[t].chunks[0].at.offset + blocks->begin;
    return {first, first + blocks->block_bytes - 1, first + blocks->block_bytes,
            first + blocks->bytes / 2, first + blocks->bytes - 1};
  }

  TempDirectory directory_;
  std::shared_ptr<Storage> storage_ = posix_storage(directory_.path());
};

TEST_F(Damaged, BitIsFoundInEveryLayout) {
  save_rows(storage_);
  const Metadata saved = metadata();
  const std::string file = saved.files[saved.find_tensor("w")->chunks[0].at.file];
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(testing::Message() << layout.ranks << " ranks, dim " << layout.dim
                                    << ", two_phase " << static_cast<int>(layout.mode));
    run_ranks(layout.ranks, [&](Communicator comm) {
      EXPECT_TRUE(loads_right(comm, Location(storage_), layout.dim, loading(comm, layout.mode)));
    });
    for (const uint64_t at : positions(saved)) {
      flip(file, at);
      const auto texts = failures(layout.ranks, [&](Communicator comm) {
        loads_right(comm, Location(storage_), layout.dim, loading(comm, layout.mode));
      });
      flip(file, at);
      EXPECT_THAT(texts, Each(AllOf(HasSubstr("is damaged: expected CRC-32"), HasSubstr("key w"),
                                    HasSubstr(file), HasSubstr("of the bytes ["))))
          << at;
    }
  }
}

TEST_F(Damaged, ChunkIsReadFromItsCopyInEveryLayout) {
  save_rows(storage_, Copies::kLocal);
  const Metadata saved = metadata();
  ASSERT_FALSE(saved.copies.empty());
  const std::string file = saved.files[saved.find_tensor("w")->chunks[0].at.file];
  flip(file, positions(saved)[3]);
  const LoggedWarnings warnings;
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(testing::Message() << layout.ranks << " ranks, dim " << layout.dim
                                    << ", two_phase " << static_cast<int>(layout.mode));
    run_ranks(layout.ranks, [&](Communicator comm) {
      EXPECT_TRUE(loads_right(comm, Location(storage_), layout.dim, loading(comm, layout.mode)));
    });
  }
  EXPECT_THAT(warnings.texts(), testing::Contains(AllOf(HasSubstr("\"w\""), HasSubstr(file))));
}

TEST_F(Damaged, BoxOfAnOpenCheckpointIsNotRead) {
  save_rows(storage_);
  const Metadata saved = metadata();
  const std::string file = saved.files[saved.find_tensor("w")->chunks[0].at.file];
  const Box row{{0, 0}, {1, kColumns}}, column{{0, 5}, {kRows, 1}}, last{{290, 0}, {10, kColumns}};
  flip(file, positions(saved)[0] + 40);
  const Checkpoint checkpoint = Checkpoint::open(Location(storage_));
  for (const Box& box : {row, column}) {
    EXPECT_THAT(failures(1, [&](Communicator) { checkpoint.read("w", box); }),
                Each(HasSubstr("is damaged")));
  }
  EXPECT_EQ(elements(checkpoint.read("w", last)), elements(whole().narrow(last)));
  OpenOptions options;
  options.checks.checksums = false;
  Checkpoint::open(Location(storage_), options).read("w", row);
}

TEST_F(Damaged, BlockIsWhatVerifyNames) {
  save_rows(storage_);
  const Metadata saved = metadata();
  const std::string file = saved.files[saved.find_tensor("w")->chunks[0].at.file];
  const uint64_t first = positions(saved)[0];
  const uint64_t block = positions(saved)[2] - first;
  flip(file, first + block + 7);
  const VerifyReport report = Checkpoint::open(Location(storage_)).verify();
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].offset, first + block);
  EXPECT_EQ(report.damages[0].size, block);
  EXPECT_EQ(report.damages[0].key, "w");
  EXPECT_THAT(report.damages[0].problem, HasSubstr("expected CRC-32"));
}

// ---- what is read ----

Location counted(const std::shared_ptr<Storage>& storage, std::atomic<uint64_t>& bytes) {
  const auto disk = FaultDisk::create(storage, [&bytes](const StorageCall& call) {
    if (call.op == StorageOp::kRead && call.name.ends_with(".distcp")) bytes += call.size;
    return FaultAction::pass();
  });
  return Location(disk->storage());
}

// "w" of 64 MiB, by rows of 16 KiB, as four ranks have them.
constexpr int64_t kLongRows = 4096;
constexpr int64_t kLongColumns = 4096;

TEST(BlockReads, AReshardedLoadReadsLittleMoreThanWhatItNeeds) {
  const auto storage = memory_storage();
  const auto box_of = [](const Communicator& comm, size_t dim) {
    Box box = Box::whole({kLongRows, kLongColumns});
    box.offset[dim] = box.shape[dim] * comm.rank() / comm.size();
    box.shape[dim] = box.shape[dim] * (comm.rank() + 1) / comm.size() - box.offset[dim];
    return box;
  };
  run_ranks(4, [&](Communicator comm) {
    const Box box = box_of(comm, 0);
    StateDict state;
    state["w"] = ShardedTensor::from_box("w", TensorView::allocate(DType::kFloat32, box.shape),
                                         {kLongRows, kLongColumns}, box);
    SaveOptions options;
    options.comm = comm;
    save(state, Location(storage), options);
  });
  constexpr uint64_t kNeeded = uint64_t{kLongRows} * kLongColumns * 4;
  for (const int ranks : {3, 4, 5, 8}) {
    for (const size_t dim : {0u, 1u}) {
      for (const bool verify : {true, false}) {
        std::atomic<uint64_t> bytes = 0;
        const Location location = counted(storage, bytes);
        run_ranks(ranks, [&](Communicator comm) {
          const Box box = box_of(comm, dim);
          StateDict wanted;
          wanted["w"] =
              ShardedTensor::from_box("w", TensorView::without_data(DType::kFloat32, box.shape),
                                      {kLongRows, kLongColumns}, box);
          LoadOptions options = loading(comm, TwoPhase::kAlways);
          options.checks.checksums = verify;
          load(wanted, location, options);
        });
        EXPECT_GE(bytes, kNeeded);
        EXPECT_LE(bytes, kNeeded + kNeeded / 20) << ranks << " ranks, dim " << dim;
      }
    }
  }
}

TEST(BlockReads, WithoutChecksumsExactlyTheBoxIsRead) {
  const auto storage = memory_storage();
  save_rows(storage);
  const Box rows{{10, 0}, {3, kColumns}};
  for (const bool verify : {true, false}) {
    std::atomic<uint64_t> bytes = 0;
    OpenOptions options;
    options.checks.checksums = verify;
    const Checkpoint checkpoint = Checkpoint::open(counted(storage, bytes), options);
    bytes = 0;
    EXPECT_EQ(elements(checkpoint.read("w", rows)), elements(whole().narrow(rows)));
    if (verify) {
      EXPECT_EQ(bytes, 128u << 10);  // the two blocks that the rows are in
    } else {
      EXPECT_EQ(bytes, 3u * kColumns * 4);
    }
  }
}

// ---- what a save records ----

// The blocks of every chunk of "w" are those of the bytes in its file.
void expect_true_blocks(const std::shared_ptr<Storage>& storage, bool listed) {
  const Metadata metadata = Checkpoint::open(Location(storage)).metadata();
  for (uint32_t t = 0; t < metadata.tensors.size(); ++t) {
    for (uint32_t c = 0; c < metadata.tensors[t].chunks.size(); ++c) {
      const ItemLocation& at = metadata.tensors[t].chunks[c].at;
      const auto blocks = blocks_of(metadata, t, c);
      ASSERT_TRUE(blocks);
      EXPECT_EQ(blocks->expected.size() > 1, listed);
      EXPECT_LE(blocks->expected.size(), 64u);
      const Bytes file = read_file(*storage, metadata.files[at.file], 1u << 30);
      const ByteView payload = ByteView(file).subspan(at.offset + blocks->begin, blocks->bytes);
      for (uint64_t b = 0; b < blocks->expected.size(); ++b) {
        const uint64_t begin = blocks->block_begin(b);
        EXPECT_EQ(crc32(payload.subspan(begin, blocks->block_end(b) - begin)), blocks->expected[b]);
      }
      EXPECT_EQ(crc32(payload), at.checksums->payload_crc32);
    }
  }
  EXPECT_TRUE(Checkpoint::open(Location(storage)).verify().ok());
}

TEST(RecordedBlocks, AreThoseOfTheFile) {
  const TempDirectory directory;
  int number = 0;
  for (const int64_t rows : {1, 20, 2000}) {  // less than a block, some, written from its memory
    for (const uint64_t buffer_bytes : {1u << 20, 64u << 20}) {
      const auto storage = posix_storage(directory.path() + "/" + std::to_string(number++));
      StateDict state;
      state["w"] = counting(DType::kFloat32, {rows, kColumns});
      SaveOptions options;
      options.resources.buffer_bytes = buffer_bytes;
      save(state, Location(storage), options);
      expect_true_blocks(storage, rows > 1);
    }
  }
}

// Columns of 1200 do not divide 3001: cells at the edge are padded.
TEST(RecordedBlocks, OfZarrCellsIncludeThePadding) {
  const auto storage = memory_storage();
  run_ranks(3, [&](Communicator comm) {
    const int64_t begin = 1200 * comm.rank();
    const Box box{{0, begin}, {kRows, std::min<int64_t>(1200, kColumns - begin)}};
    StateDict state;
    state["w"] = ShardedTensor::from_box("w", whole().narrow(box), {kRows, kColumns}, box);
    SaveOptions options;
    options.comm = comm;
    options.format = zarr_format();
    save(state, Location(storage), options);
  });
  expect_true_blocks(storage, true);
  FileImage image = memory_image(*storage);
  const Box rows{{100, 0}, {50, kColumns}};
  EXPECT_EQ(elements(Checkpoint::open(Location(storage)).read("w", rows)),
            elements(whole().narrow(rows)));
  image.at("w/0.1")[110 * 1200 * 4] ^= std::byte{1};
  const Checkpoint damaged = Checkpoint::open(Location(memory_storage(image)));
  EXPECT_THAT(failures(1, [&](Communicator) { damaged.read("w", rows); }),
              Each(AllOf(HasSubstr("is damaged"), HasSubstr("w/0.1"), HasSubstr("key w"))));
}

// ---- checkpoints without checksums of blocks ----

TEST(WithoutBlocks, PartsAreReadAndTheLogSaysOnceThatTheyWereNotChecked) {
  const auto storage = memory_storage();
  save_rows(storage);
  const auto other = memory_storage(as_of_another_writer(memory_image(*storage)));
  std::mutex mutex;
  std::vector<std::string> texts;
  const LogLevel before = set_log_level(LogLevel::kInfo);
  set_log_sink([&](LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (level == LogLevel::kInfo && text.find("are not checked") != std::string_view::npos) {
      texts.emplace_back(text);
    }
  });
  for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
    texts.clear();
    run_ranks(3, [&](Communicator comm) {
      EXPECT_TRUE(loads_right(comm, Location(other), 0, loading(comm, mode)));
    });
    EXPECT_FALSE(texts.empty());
    EXPECT_LE(texts.size(), 3u);  // once for each rank
    EXPECT_THAT(texts, Each(HasSubstr("\"w\"")));
  }
  texts.clear();
  run_ranks(3, [&](Communicator comm) {
    EXPECT_TRUE(loads_right(comm, Location(storage), 0, loading(comm, TwoPhase::kNever)));
  });
  EXPECT_TRUE(texts.empty());
  set_log_sink({});
  set_log_level(before);
}

}  // namespace tilestone::block_checks_test
