// The number of bytes that each rank of a load reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::read_balance_test {

using TwoPhase = Reading::TwoPhase;

constexpr int kTensors = 48;
constexpr int64_t kShare = 96;  // rows of a tensor: a multiple of each number of ranks used here
constexpr int64_t kColumns = 1024;

// Tensor-parallel groups of `tp` ranks, with data parallelism over these groups.
struct Layout {
  int ranks = 1;
  int tp = 1;
};

// Tensors of which each rank has its tensor-parallel share of rows; every third tensor is whole on
// all ranks.
StateDict state_of(int rank, const Layout& layout, bool with_data) {
  const int place = rank % layout.tp;
  StateDict state;
  for (int i = 0; i < kTensors; ++i) {
    const std::string key = "t" + std::to_string(i);
    const bool whole = i % 3 == 0;
    const int parts = whole ? 1 : layout.tp;
    const int64_t rows = (whole ? kShare / 8 : kShare) / parts;
    const int64_t first = whole ? 0 : place * rows * kColumns;
    const TensorView data = with_data ? counting(DType::kFloat32, {rows, kColumns}, first + i)
                                      : TensorView::without_data(DType::kFloat32, {rows, kColumns});
    ShardedTensor tensor = ShardedTensor::from_rank_offsets(
        key, data, {{0, whole ? 0 : place, parts}}, {whole ? rank : rank / layout.tp});
    for (int r = 0; r < layout.ranks; ++r) {
      if (whole || r % layout.tp == place) tensor.holders.push_back(r);
    }
    state[key] = tensor;
  }
  return state;
}

FileImage saved(const Layout& layout, bool copies) {
  const auto storage = memory_storage();
  run_ranks(layout.ranks, [&](Communicator comm) {
    SaveOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    if (copies) {
      options.copies.emplace();
      const int first = comm.rank() / layout.tp * layout.tp;
      for (int i = 0; i < layout.tp; ++i) options.copies->group.push_back(first + i);
    }
    save(state_of(comm.rank(), layout, true), Location(storage), options);
  });
  return memory_image(*storage);
}

// The bytes that each rank reads from data files. Also compares all elements.
std::vector<uint64_t> bytes_read(const FileImage& image, const Layout& layout, TwoPhase mode) {
  std::mutex mutex;
  std::vector<uint64_t> bytes(static_cast<size_t>(layout.ranks), 0);
  const auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
    const std::lock_guard lock(mutex);
    if (call.op == StorageOp::kRead && call.name.ends_with(".distcp")) {
      bytes[static_cast<size_t>(call.client)] += call.size;
    }
    return FaultAction::pass();
  });
  run_ranks(layout.ranks, [&](Communicator comm) {
    LoadOptions options;
    options.comm = comm;
    options.resources.threads = 1;
    options.timeout = 60;
    options.reading.two_phase = mode;
    const StateDict expected = state_of(comm.rank(), layout, true);
    const StateDict loaded =
        load(state_of(comm.rank(), layout, false), Location(disk->storage(comm.rank())), options);
    for (int i = 0; i < kTensors; ++i) {
      const std::string key = "t" + std::to_string(i);
      EXPECT_TRUE(same_bytes(elements(loaded.get<ShardedTensor>(key).data),
                             elements(expected.get<ShardedTensor>(key).data)))
          << key;
    }
  });
  return bytes;
}

// `whole`: the bytes that one rank reads as one unit.
void expect_balanced(const std::vector<uint64_t>& bytes, uint64_t whole) {
  const uint64_t sum = std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
  const uint64_t most = *std::max_element(bytes.begin(), bytes.end());
  EXPECT_GT(sum, 0u);
  EXPECT_LE(most, sum / bytes.size() * 5 / 4 + whole) << testing::PrintToString(bytes);
}

constexpr Layout kLayouts[] = {{2, 2}, {4, 4}, {4, 2}, {4, 1}, {8, 2}, {3, 3}, {6, 2}};

// The ranks of a layout hold equally many bytes. So none of them may read more than another, with
// or without two-phase reading and copies.
TEST(ReadBalance, NoRankReadsMoreThanAQuarterBeyondTheMean) {
  for (const Layout& from : {Layout{4, 4}, Layout{4, 2}, Layout{8, 2}, Layout{1, 1}}) {
    for (const bool copies : {false, true}) {
      if (copies && from.ranks == 1) continue;
      const FileImage image = saved(from, copies);
      for (const Layout& to : kLayouts) {
        for (const TwoPhase mode : {TwoPhase::kNever, TwoPhase::kAlways}) {
          SCOPED_TRACE(testing::Message()
                       << from.ranks << " ranks, tp " << from.tp << (copies ? ", copies" : "")
                       << ", to " << to.ranks << ", tp " << to.tp
                       << (mode == TwoPhase::kAlways ? ", exchange" : ", alone"));
          // With two-phase reading, ranks share the files in stripes of 1 MiB or more.
          expect_balanced(bytes_read(image, to, mode), mode == TwoPhase::kAlways ? 1u << 20 : 0);
        }
      }
    }
  }
}

}  // namespace tilestone::read_balance_test
