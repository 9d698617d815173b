// Two-phase reading gives the same elements as reading without it, with fewer bytes and reads.
#include "tilestone/engine/exchange/exchange_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "tilestone/base/sanitized_testing.h"
#include "tilestone/comm/relay_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::exchange_test {

using engine::ReadFor;
using engine::reading_of_ranks;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using TwoPhase = Reading::TwoPhase;

LoadOptions loading(const Communicator& comm, TwoPhase mode) {
  LoadOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 8u << 20;
  options.resources.threads = 2;
  options.reading.two_phase = mode;
  options.timeout = 120;
  return options;
}

// The reads that all ranks make of data files.
struct Traffic {
  std::atomic<uint64_t> reads = 0;
  std::atomic<uint64_t> bytes = 0;
};

Location counting_reads(const std::shared_ptr<Storage>& inner, Traffic& traffic) {
  const auto disk = FaultDisk::create(inner, [&](const StorageCall& call) {
    if (call.op == StorageOp::kRead && call.name.find(".distcp") != std::string_view::npos) {
      ++traffic.reads;
      traffic.bytes += call.size;
    }
    return FaultAction::pass();
  });
  return Location(disk->storage());
}

// The messages that the ranks of a group send.
struct Sent {
  std::atomic<int> exchanges = 0;
  std::atomic<uint64_t> largest = 0;  // bytes of all messages of one exchange, sent or received
};

class CountingComm final : public RelayComm {
 public:
  CountingComm(Communicator comm, Sent& sent) : RelayComm(std::move(comm)), sent_(sent) {}
  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) override {
    ++sent_.exchanges;
    count(to);
    std::vector<Bytes> from = comm_.all_to_all(std::move(to), deadline);
    count(from);
    return from;
  }

 private:
  void count(const std::vector<Bytes>& messages) {
    uint64_t bytes = 0;
    for (const Bytes& message : messages) bytes += message.size();
    uint64_t before = sent_.largest;
    while (before < bytes && !sent_.largest.compare_exchange_weak(before, bytes)) {
    }
  }

  Sent& sent_;
};

// ---- rows become columns ----

constexpr int64_t kRows = 512;
constexpr int64_t kColumns = 8192;
constexpr uint64_t kMatrixBytes = kRows * kColumns * 4;  // 16 MiB

// A rank's part [begin, end) of `count`, as equal as possible.
std::pair<int64_t, int64_t> part_of(int64_t count, const Communicator& comm) {
  return {count * comm.rank() / comm.size(), count * (comm.rank() + 1) / comm.size()};
}

std::shared_ptr<Storage> save_rows(int ranks,
                                   const std::shared_ptr<Storage>& storage = memory_storage()) {
  run_ranks(ranks, [&](Communicator comm) {
    StateDict state;
    const auto [begin, end] = part_of(kRows, comm);
    state["w"] = ShardedTensor::from_box(
        "w", counting(DType::kFloat32, {end - begin, kColumns}, begin * kColumns),
        {kRows, kColumns}, {{begin, 0}, {end - begin, kColumns}});
    SaveOptions options;
    options.comm = comm;
    save(state, Location(storage), options);
  });
  return storage;
}

Box own_columns(const Communicator& comm) {
  const auto [begin, end] = part_of(kColumns, comm);
  return {{0, begin}, {kRows, end - begin}};
}

TensorView load_columns(const Communicator& comm, const Location& location,
                        const LoadOptions& options) {
  const Box box = own_columns(comm);
  StateDict wanted;
  wanted["w"] = ShardedTensor::from_box("w", TensorView::without_data(DType::kFloat32, box.shape),
                                        {kRows, kColumns}, box);
  const StateDict loaded = load(wanted, location, options);
  return loaded.find("w")->get_if<ShardedTensor>()->data;
}

void expect_columns(const Communicator& comm, const Location& location,
                    const LoadOptions& options) {
  const TensorView data = load_columns(comm, location, options);
  static const TensorView all = counting(DType::kFloat32, {kRows, kColumns});
  EXPECT_TRUE(same_bytes(elements(data), elements(all.narrow(own_columns(comm)))));
}

class RowsToColumns : public testing::TestWithParam<int> {};

TEST_P(RowsToColumns, AreReadOnceInFewReads) {
  const int ranks = GetParam();
  const auto storage = save_rows(ranks);
  Traffic together, apart;
  for (const TwoPhase mode : {TwoPhase::kAlways, TwoPhase::kNever}) {
    Traffic& traffic = mode == TwoPhase::kAlways ? together : apart;
    const Location location = counting_reads(storage, traffic);
    run_ranks(ranks,
              [&](Communicator comm) { expect_columns(comm, location, loading(comm, mode)); });
  }
  std::printf("[          ] %d ranks: %lu bytes in %lu reads, without exchange %lu in %lu\n", ranks,
              together.bytes.load(), together.reads.load(), apart.bytes.load(), apart.reads.load());
  EXPECT_LE(together.bytes, kMatrixBytes + kMatrixBytes / 20);
  EXPECT_LE(together.reads * 5, static_cast<uint64_t>(kRows * ranks));
}

INSTANTIATE_TEST_SUITE_P(Ranks, RowsToColumns, testing::Values(2, 4, 8));

TEST(TwoPhase, MessagesKeepToTheirShareOfTheBuffers) {
  const auto storage = save_rows(4);
  Sent sent;
  run_ranks(4, [&](Communicator comm) {
    const Communicator counted(std::make_shared<CountingComm>(comm, sent));
    expect_columns(counted, Location(storage), loading(counted, TwoPhase::kAlways));
  });
  EXPECT_GT(sent.exchanges, 4 * 4);  // several rounds
  EXPECT_LE(sent.largest, (8u << 20) / 8 + (64u << 10));
}

TEST(TwoPhase, IsNotUsedOnOneHostWithACacheUnlessAskedFor) {
  const auto storage = save_rows(2);
  for (const TwoPhase mode : {TwoPhase::kAuto, TwoPhase::kNever}) {
    Sent sent;
    run_ranks(2, [&](Communicator comm) {
      const Communicator counted(std::make_shared<CountingComm>(comm, sent));
      expect_columns(counted, Location(storage), loading(counted, mode));
    });
    EXPECT_EQ(sent.exchanges, 0);
  }
}

TEST(TwoPhase, IsUsedWhereRanksRunOnSeveralHosts) {
  const std::vector<std::string> one = {"a", "a", "a"}, two = {"a", "a", "b"}, alone = {"a"};
  const StorageFacts store, cached = {.page_cache = true},
                            shared = {.page_cache = true, .shared_cache = true};
  for (const StorageFacts& facts : {store, cached, shared}) {
    EXPECT_EQ(reading_of_ranks(TwoPhase::kAuto, two, facts), ReadFor::kMessages);
    EXPECT_EQ(reading_of_ranks(TwoPhase::kNever, two, facts), ReadFor::kOneself);
    EXPECT_EQ(reading_of_ranks(TwoPhase::kAlways, one, facts), ReadFor::kMessages);
    EXPECT_EQ(reading_of_ranks(TwoPhase::kAlways, alone, facts), ReadFor::kOneself);
  }
  EXPECT_EQ(reading_of_ranks(TwoPhase::kAuto, one, store), ReadFor::kSharedMemory);
  EXPECT_EQ(reading_of_ranks(TwoPhase::kAuto, one, cached), ReadFor::kOneself);
  EXPECT_EQ(reading_of_ranks(TwoPhase::kAuto, one, shared), ReadFor::kPageCache);
}

TEST(TwoPhase, ColumnsAreReadOnceFromAStoreOnOneHostToo) {
  const auto store = save_rows(4, memory_objects());
  Traffic traffic;
  const Location location = counting_reads(store, traffic);
  Sent sent;
  run_ranks(4, [&](Communicator comm) {
    const Communicator counted(std::make_shared<CountingComm>(comm, sent));
    expect_columns(counted, location, loading(counted, TwoPhase::kAuto));
  });
  EXPECT_LE(traffic.bytes, kMatrixBytes + kMatrixBytes / 20);
  EXPECT_LT(sent.largest, 64u << 10);  // the elements are in shared memory
}

TEST(TwoPhase, RanksThatDisagreeAboutItGetAnError) {
  const auto storage = save_rows(1);
  const auto texts = failures(3, [&](Communicator comm) {
    const auto mode = comm.rank() == 2 ? TwoPhase::kNever : TwoPhase::kAlways;
    expect_columns(comm, Location(storage), loading(comm, mode));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("two_phase"), HasSubstr("rank 2"))));
}

// ---- tensors that all ranks want ----

constexpr int kTensors = 40;

// Sizes: 4 bytes, 60 KB, 120 KB, ..., and 10 MB for the last one.
Dims shape_of(int tensor) {
  return {tensor == kTensors - 1 ? 2'500'000 : 1 + 15'000 * (tensor % 10)};
}

StateDict replicas(bool filled) {
  StateDict state;
  for (int i = 0; i < kTensors; ++i) {
    const Dims shape = shape_of(i);
    state["t" + std::to_string(i)] = filled ? counting(DType::kFloat32, shape, i)
                                            : TensorView::without_data(DType::kFloat32, shape);
  }
  return state;
}

uint64_t replica_bytes() {
  uint64_t bytes = 0;
  for (int i = 0; i < kTensors; ++i) bytes += static_cast<uint64_t>(numel(shape_of(i))) * 4;
  return bytes;
}

std::shared_ptr<Storage> save_replicas() {
  const auto storage = memory_storage();
  run_ranks(2, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    save(replicas(true), Location(storage), options);
  });
  return storage;
}

TEST(TwoPhase, ReplicatedTensorsAreReadOnce) {
  const auto storage = save_replicas();
  constexpr int kRanks = 4;
  std::vector<Bytes> expected;
  for (int i = 0; i < kTensors; ++i) {
    expected.push_back(elements(counting(DType::kFloat32, shape_of(i), i)));
  }
  Traffic together, apart;
  for (const TwoPhase mode : {TwoPhase::kAlways, TwoPhase::kNever}) {
    const Location location = counting_reads(storage, mode == TwoPhase::kAlways ? together : apart);
    run_ranks(kRanks, [&](Communicator comm) {
      const StateDict loaded = load(replicas(false), location, loading(comm, mode));
      for (int i = 0; i < kTensors; ++i) {
        const auto* data = loaded.find("t" + std::to_string(i))->get_if<TensorView>();
        ASSERT_TRUE(same_bytes(elements(*data), expected[static_cast<size_t>(i)])) << i;
      }
    });
  }
  std::printf("[          ] %lu bytes in %lu reads, without exchange %lu in %lu\n",
              together.bytes.load(), together.reads.load(), apart.bytes.load(), apart.reads.load());
  EXPECT_LE(together.bytes, replica_bytes() + replica_bytes() / 20);
  EXPECT_GE(apart.bytes, replica_bytes() * kRanks);
  EXPECT_GE(together.bytes, together.reads * (64u << 10));
}

TEST(TwoPhase, EachRankReadsItsShareOfWhatAllWant) {
  const auto storage = save_replicas();
  constexpr int kRanks = 4;
  std::vector<Traffic> of_rank(kRanks);
  run_ranks(kRanks, [&](Communicator comm) {
    Traffic& traffic = of_rank[static_cast<size_t>(comm.rank())];
    load(replicas(false), counting_reads(storage, traffic), loading(comm, TwoPhase::kAlways));
  });
  for (const Traffic& traffic : of_rank) {
    EXPECT_GT(traffic.bytes, replica_bytes() / kRanks / 2);
    EXPECT_LT(traffic.bytes, replica_bytes() / kRanks * 3 / 2);
  }
}

TEST(TwoPhase, CastsOnTheWayIntoTheTensor) {
  const auto storage = save_replicas();
  run_ranks(3, [&](Communicator comm) {
    StateDict wanted;
    const DType dtype = comm.rank() == 1 ? DType::kFloat64 : DType::kFloat32;
    wanted["t39"] = TensorView::without_data(dtype, shape_of(39));
    LoadOptions options = loading(comm, TwoPhase::kAlways);
    options.cast = true;
    const StateDict loaded = load(wanted, Location(storage), options);
    const TensorView& data = *loaded.find("t39")->get_if<TensorView>();
    if (comm.rank() != 1) {
      EXPECT_EQ(elements(data), elements(counting(DType::kFloat32, shape_of(39), 39)));
      return;
    }
    for (int64_t i = 0; i < numel(shape_of(39)); ++i) {
      ASSERT_EQ(reinterpret_cast<const double*>(data.data)[i], static_cast<double>(i + 39));
    }
  });
}

// ---- any boxes ----

// What each rank wants of "w": boxes that span several tiles, sometimes all of it, or nothing.
std::vector<std::vector<Box>> random_boxes(std::mt19937_64& random, int ranks) {
  std::vector<std::vector<Box>> all;
  const auto draw = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const bool tall = random() % 2 == 0;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<Box>& boxes = all.emplace_back();
    for (uint64_t i = random() % 4; i > 0; --i) {
      const int64_t row = draw(kRows), column = draw(kColumns);
      const Box box{{row, column}, {1 + draw(kRows - row), 1 + draw(kColumns - column)}};
      boxes.push_back(tall ? Box{{row, 0}, {box.shape[0], kColumns}} : box);
    }
    if (random() % 4 == 0) boxes.push_back(Box::whole({kRows, kColumns}));
  }
  return all;
}

TEST(TwoPhase, RandomBoxesAreTheSameAsWithoutIt) {
  const auto storage = save_rows(3), store = save_rows(3, memory_objects());
  const TensorView all = counting(DType::kFloat32, {kRows, kColumns});
  std::mt19937_64 random(7);
  for (int trip = 0; trip < (kSlowBytes ? 5 : 12); ++trip) {
    SCOPED_TRACE(trip);
    const int ranks = 2 + static_cast<int>(random() % 4);
    const std::vector<std::vector<Box>> boxes = random_boxes(random, ranks);
    run_ranks(ranks, [&](Communicator comm) {
      StateDict wanted;
      size_t place = 0;
      for (const Box& box : boxes[static_cast<size_t>(comm.rank())]) {
        wanted[std::to_string(place++)] = ShardedTensor::from_box(
            "w", TensorView::without_data(DType::kFloat32, box.shape), {kRows, kColumns}, box);
      }
      const bool shares = trip % 2 == 0;  // memory: of a store, on one host
      const StateDict loaded = load(wanted, Location(shares ? store : storage),
                                    loading(comm, shares ? TwoPhase::kAuto : TwoPhase::kAlways));
      for (const auto& [key, node] : loaded.entries()) {
        const auto* tensor = node.get_if<ShardedTensor>();
        ASSERT_TRUE(same_bytes(elements(tensor->data), elements(all.narrow(tensor->box))))
            << to_string(tensor->box);
      }
    });
  }
}

// ---- damage ----

// A location whose tensor "w" has one flipped bit in its last rows.
Location damaged(const std::shared_ptr<Storage>& storage, std::string& file) {
  FileImage image = memory_image(*storage);
  const Checkpoint checkpoint = Checkpoint::open(Location(memory_storage(image)));
  const ItemLocation at = checkpoint.metadata().find_tensor("w")->chunks.back().at;
  file = checkpoint.metadata().files[at.file];
  image[file][at.offset + at.length - 5000] ^= std::byte{4};
  return Location(memory_storage(std::move(image)));
}

TEST(TwoPhase, DamageIsFoundThoughEachRankWantsAPart) {
  std::string file;
  const Location location = damaged(save_rows(2), file);  // a chunk of 8 MiB has several owners
  const auto texts = failures(3, [&](Communicator comm) {
    load_columns(comm, location, loading(comm, TwoPhase::kAlways));
  });
  EXPECT_THAT(texts, Each(AllOf(HasSubstr("is damaged: expected CRC-32"), HasSubstr("key w"),
                                HasSubstr(file), HasSubstr("rank"))));
  EXPECT_THAT(texts, Each(texts[0]));
}

TEST(TwoPhase, DamageIsLetThroughWhereChecksumsAreNotWanted) {
  std::string file;
  const Location location = damaged(save_rows(2), file);
  run_ranks(3, [&](Communicator comm) {
    LoadOptions options = loading(comm, TwoPhase::kAlways);
    options.checks.checksums = false;
    load_columns(comm, location, options);
  });
}

}  // namespace tilestone::exchange_test
