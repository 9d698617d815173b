// Many tensors and many ranks. Nothing is timed here, but a cost that grows too fast exceeds the
// test's time limit.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/load/load.h"
#include "tilestone/engine/save/save.h"

namespace tilestone::scale_test {

constexpr int64_t kManyTensors = TILESTONE_TEST_TENSORS;
constexpr int64_t kSmall = 4096;  // bytes
// With options.resources.threads = 2: the rank itself, two threads that compute, and two that wait
// for I/O.
constexpr int kThreadsOfARank = 5;

class Scale : public testing::Test {
 protected:
  Scale()
      : root_(std::filesystem::path(testing::TempDir()) /
              (std::string("tilestone_scale_") +
               testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(root_);
  }
  ~Scale() override { std::filesystem::remove_all(root_); }

  const std::filesystem::path root_;
};

std::byte byte_of(int64_t tensor, int64_t place) {
  return static_cast<std::byte>(tensor * 31 + place * 7);
}

std::string key_of(int64_t tensor) {
  return "layers." + std::to_string(tensor / 10) + ".p" + std::to_string(tensor % 10);
}

// One tensor per key, all in one allocation.
StateDict many_tensors(const TensorView& memory) {
  StateDict state;
  for (int64_t t = 0; t < kManyTensors; ++t) {
    state[key_of(t)] =
        TensorView::contiguous(memory.data + t * kSmall, DType::kUInt8, {kSmall}, memory.owner);
  }
  return state;
}

TEST_F(Scale, AHundredThousandTensorsOf4KiBComeBackAndAreListedAndVerified) {
  const TensorView memory = TensorView::allocate(DType::kUInt8, {kManyTensors, kSmall});
  for (int64_t i = 0; i < kManyTensors * kSmall; ++i) {
    memory.data[i] = byte_of(i / kSmall, i % kSmall);
  }
  save(many_tensors(memory), root_);
  std::memset(memory.data, 0, memory.bytes());
  load(many_tensors(memory), root_);
  int64_t wrong = 0;
  for (int64_t i = 0; i < kManyTensors * kSmall; ++i) {
    wrong += memory.data[i] != byte_of(i / kSmall, i % kSmall) ? 1 : 0;
  }
  EXPECT_EQ(wrong, 0);

  const Checkpoint checkpoint = Checkpoint::open(root_);
  EXPECT_EQ(checkpoint.keys().size(), static_cast<size_t>(kManyTensors));
  const TensorView last = checkpoint.read(key_of(kManyTensors - 1));
  EXPECT_EQ(last.data[kSmall - 1], byte_of(kManyTensors - 1, kSmall - 1));
  const VerifyReport verified = checkpoint.verify();
  EXPECT_TRUE(verified.ok());
  EXPECT_EQ(verified.items, static_cast<uint64_t>(kManyTensors));
}

int threads_of_this_process() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
  }
  ADD_FAILURE() << "no Threads in /proc/self/status";
  return 0;
}

// The maximum number of threads of this process during `work` (sampled) minus the number before it.
template <typename Work>
int most_threads(const Work& work) {
  const int before = threads_of_this_process();
  std::atomic<bool> ended = false;
  int most = 0;
  std::thread sampler([&] {
    while (!ended) most = std::max(most, threads_of_this_process());
  });
  work();
  ended = true;
  sampler.join();
  return most - before;
}

// A rank's rows or columns of a matrix, divided as evenly as possible.
StateDict part_of(const Dims& shape, size_t dim, const Communicator& comm, bool filled) {
  Box box = Box::whole(shape);
  box.offset[dim] = shape[dim] * comm.rank() / comm.size();
  box.shape[dim] = shape[dim] * (comm.rank() + 1) / comm.size() - box.offset[dim];
  const TensorView part = TensorView::allocate(DType::kUInt8, box.shape);
  for (int64_t i = 0; filled && i < numel(box.shape); ++i) {
    part.data[i] = byte_of(box.offset[0] + i / box.shape[1], box.offset[1] + i % box.shape[1]);
  }
  StateDict state;
  state["matrix"] = ShardedTensor::from_box("matrix", part, shape, box);
  return state;
}

int64_t wrong_bytes(const StateDict& state) {
  const auto& matrix = *state.find("matrix")->get_if<ShardedTensor>();
  const Box& box = matrix.box;
  int64_t wrong = 0;
  for (int64_t i = 0; i < numel(box.shape); ++i) {
    const std::byte expected =
        byte_of(box.offset[0] + i / box.shape[1], box.offset[1] + i % box.shape[1]);
    wrong += matrix.data.data[i] != expected ? 1 : 0;
  }
  return wrong;
}

TEST_F(Scale, RowsOf64RanksComeBackAsColumnsOf48WithAFewThreadsPerRank) {
  const Dims shape{64 * 3 + 5, 1000};
  const int saving = most_threads([&] {
    run_ranks(64, [&](Communicator comm) {
      save(part_of(shape, 0, comm, true), root_, {.comm = comm, .resources = {.threads = 2}});
    });
  });
  std::atomic<int64_t> wrong = 0;
  const int loading = most_threads([&] {
    run_ranks(48, [&](Communicator comm) {
      const StateDict wanted = part_of(shape, 1, comm, false);
      load(wanted, root_, {.comm = comm, .resources = {.threads = 2}});
      wrong += wrong_bytes(wanted);
    });
  });
  EXPECT_EQ(wrong, 0);
  std::printf("[          ] threads: %d in a save of 64 ranks, %d in a load of 48\n", saving,
              loading);
  EXPECT_LE(saving, 64 * kThreadsOfARank);
  EXPECT_LE(loading, 48 * kThreadsOfARank);
}

}  // namespace tilestone::scale_test
