// Beyond the tensors, a save or load uses only the memory of the buffer pool, and a little more.
// Measured by the kernel's counters, in a real directory.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "tests/peak_memory.h"
#include "tilestone/base/buffer_pool.h"
#include "tilestone/engine/load.h"
#include "tilestone/engine/save.h"

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
