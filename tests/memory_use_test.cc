// Beyond the tensors, a save or load uses only the memory of the buffer pool, and a little more.
// Measured by the kernel's counters, in a real directory.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <optional>
#include <string>

#include "tests/peak_memory.h"
#include "tilestone/base/buffer_pool.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/load/load.h"
#include "tilestone/engine/save/async_save.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/session.h"

namespace tilestone::memory_use_test {

constexpr uint64_t kPool = 32u << 20;   // bytes
constexpr uint64_t kRest = 16u << 20;   // threads, lists, the allocator itself; bytes
constexpr int64_t kTensor = 256 << 20;  // bytes

class MemoryUse : public testing::Test {
 protected:
  MemoryUse() : root_(std::filesystem::path(testing::TempDir()) / "tilestone_memory_use") {
    std::filesystem::remove_all(root_);
    std::memset(tensor_.data, 7, tensor_.bytes());
  }
  ~MemoryUse() override { std::filesystem::remove_all(root_); }

  StateDict state() const {
    StateDict state;
    state["w"] = tensor_;
    return state;
  }

  const std::filesystem::path root_;
  const TensorView tensor_ = TensorView::allocate(DType::kUInt8, {64, kTensor / 64});
};

TEST_F(MemoryUse, OfASaveAndALoadIsTheBufferPool) {
  SaveOptions saving;
  saving.resources.buffer_bytes = kPool;
  saving.resources.threads = 2;
  const uint64_t saved = peak_of([&] { save(state(), root_, saving); });
  EXPECT_LE(saved, kPool + kRest);
  std::memset(tensor_.data, 1, tensor_.bytes());
  LoadOptions loading;
  loading.resources.buffer_bytes = kPool;
  loading.resources.threads = 2;
  const uint64_t loaded = peak_of([&] { load(state(), root_, loading); });
  EXPECT_LE(loaded, kPool + kRest);
  EXPECT_EQ(tensor_.data[0], std::byte{7});
  EXPECT_EQ(tensor_.data[kTensor - 1], std::byte{7});
  std::printf("[          ] above 256 MiB of tensor: save %.1f MiB, load %.1f MiB\n",
              static_cast<double>(saved) / (1 << 20), static_cast<double>(loaded) / (1 << 20));
}

// Tensors of 8 MiB each, as many as fit; the others are written from where they are.
TEST_F(MemoryUse, OfAnAsynchronousSaveIsOneCopyOrTheMemoryThatItIsAllowed) {
  constexpr uint64_t kOne = 8u << 20, kPage = 4096, kBuffers = 4u << 20;
  StateDict state;
  for (int64_t i = 0; i < 8; ++i) {
    state["w" + std::to_string(i)] = tensor_.narrow({{2 * i, 0}, {2, tensor_.shape[1]}});
  }
  SaveOptions saving;
  saving.resources.buffer_bytes = kBuffers;
  saving.resources.threads = 2;
  saving.overwrite = true;
  for (const std::optional<uint64_t>& most :
       {std::optional<uint64_t>(), std::optional<uint64_t>(2 * kOne + 2 * kPage),
        std::optional<uint64_t>(2 * kOne)}) {
    const AsyncOptions async{.max_staged_bytes = most};
    const uint64_t fit = most ? *most / (kOne + kPage) : 8;  // tensors
    EXPECT_EQ(Session().prepare(state, saving, async), fit * (kOne + kPage));
    const uint64_t used = peak_of([&] {
      const AsyncSave saving_it = async_save(state, root_, saving, async);
      EXPECT_GE(saving_it.result().bytes_written, 8 * kOne);
    });
    EXPECT_LE(used, kBuffers + kRest + fit * (kOne + kPage));
    EXPECT_GE(used + kRest, fit * kOne);
    const Checkpoint checkpoint = Checkpoint::open(Location(root_));
    EXPECT_TRUE(checkpoint.verify().ok());
    EXPECT_EQ(checkpoint.read("w7").data[kOne - 1], std::byte{7});
    std::printf("[          ] %lu of 8 tensors of 8 MiB are staged: %.1f MiB\n",
                static_cast<unsigned long>(fit), static_cast<double>(used) / (1 << 20));
  }
}

// Columns of a strided tensor can't be read directly, so all data goes through buffers.
TEST_F(MemoryUse, OfAReshardedLoadIsTheBufferPool) {
  SaveOptions saving;
  saving.resources.buffer_bytes = kPool;
  save(state(), root_, saving);
  const Dims half{64, kTensor / 128};
  StateDict wanted;
  TensorView target = TensorView::allocate(DType::kUInt8, half);
  std::memset(target.data, 1, target.bytes());
  wanted["w"] = ShardedTensor::from_box("w", target, tensor_.shape, {{0, 1000}, half});
  LoadOptions loading;
  loading.resources.buffer_bytes = kPool;
  loading.resources.threads = 2;
  EXPECT_LE(peak_of([&] { load(wanted, root_, loading); }), kPool + kRest);
  EXPECT_EQ(target.data[kTensor / 2 - 1], std::byte{7});
}

}  // namespace tilestone::memory_use_test
