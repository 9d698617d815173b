// Saves a tensor beyond all 32-bit limits, and loads it in boxes, within the memory of the buffer
// pool. It needs the tensor's size on disk and takes a while, so `make soak` runs it, not
// `make test`.
//
//   large_tensor GIB FOLDER
//
// Only a few marked bytes of the tensor's memory are written, so it uses pages only for those.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/peak_memory.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/load/load.h"
#include "tilestone/engine/save/save.h"

namespace {

using namespace tilestone;

constexpr int64_t kRow = 1 << 20;          // bytes
constexpr uint64_t kPool = 256u << 20;     // bytes
constexpr uint64_t kAllowed = 272u << 20;  // the pool plus 16 MiB for threads and lists
constexpr int64_t kBlock = 256;            // rows per box

template <typename Work>
void within_memory(const char* what, const Work& work) {
  const uint64_t peak = peak_of(work);
  std::printf("%s: peak %.1f MiB above the tensors\n", what, static_cast<double>(peak) / (1 << 20));
  if (peak > kAllowed) throw Error(ErrorCode::kInternal, std::string(what) + " took more memory");
}

// The offsets of marked bytes: the ends, and both sides of 2^31, 2^32 and every GiB.
std::vector<int64_t> marked_places(int64_t bytes) {
  std::vector<int64_t> places = {0, bytes - 1};
  for (int64_t at = 1 << 30; at < bytes; at += 1 << 30) {
    places.push_back(at - 1);
    places.push_back(at);
  }
  return places;
}

std::byte mark_of(int64_t place) { return static_cast<std::byte>(1 + place % 251); }

std::byte expected_at(int64_t place, const std::vector<int64_t>& places) {
  for (const int64_t marked : places) {
    if (marked == place) return mark_of(place);
  }
  return std::byte{0};
}

// Checks a box of the tensor: marked bytes must have their values, all others must be zero.
void expect_box(const TensorView& loaded, const Box& box, const std::vector<int64_t>& places) {
  uint64_t marks = 0;
  for (int64_t i = 0; i < numel(box.shape); ++i) {
    if (loaded.data[i] == std::byte{0}) continue;
    const int64_t place =
        (box.offset[0] + i / box.shape[1]) * kRow + box.offset[1] + i % box.shape[1];
    if (loaded.data[i] != expected_at(place, places)) {
      throw Error(ErrorCode::kInternal, "the byte at " + std::to_string(place) + " is wrong");
    }
    ++marks;
  }
  uint64_t wanted = 0;
  for (const int64_t place : places) {
    const Box at{{place / kRow, place % kRow}, {1, 1}};
    wanted += box.contains(at) ? 1 : 0;
  }
  if (marks != wanted)
    throw Error(ErrorCode::kInternal, "a marked byte is lost in " + to_string(box));
}

void run(int64_t gib, const std::string& folder) {
  const int64_t bytes = gib << 30;
  const Dims shape{bytes / kRow, kRow};
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw Error(ErrorCode::kIo, "mmap of the tensor failed");
  madvise(memory, static_cast<size_t>(bytes), MADV_NOHUGEPAGE);  // reading takes no page then
  const TensorView tensor = TensorView::contiguous(memory, DType::kUInt8, shape);
  const std::vector<int64_t> places = marked_places(bytes);
  for (const int64_t place : places) tensor.data[place] = mark_of(place);
  StateDict state;
  state["large"] = tensor;
  state["behind"] = 7;
  SaveOptions saving;
  saving.resources.buffer_bytes = kPool;
  within_memory("save", [&] { save(state, folder, saving); });
  munmap(memory, static_cast<size_t>(bytes));

  LoadOptions loading;
  loading.resources.buffer_bytes = kPool;
  const Dims block{kBlock, kRow};
  const TensorView rows = TensorView::allocate(DType::kUInt8, block);
  std::fill_n(rows.data, rows.bytes(), std::byte{9});
  within_memory("load of boxes of whole rows", [&] {
    for (int64_t row = 0; row < shape[0]; row += kBlock) {
      StateDict wanted;
      wanted["large"] = ShardedTensor::from_box("large", rows, shape, {{row, 0}, block});
      load(wanted, folder, loading);
      expect_box(rows, {{row, 0}, block}, places);
    }
  });
  const Dims column{shape[0], 4096};
  const TensorView columns = TensorView::allocate(DType::kUInt8, column);
  for (const int64_t at : {int64_t{0}, kRow / 2, kRow - 4096}) {
    std::fill_n(columns.data, columns.bytes(), std::byte{9});
    within_memory("load of a box of columns", [&] {
      StateDict wanted;
      wanted["large"] = ShardedTensor::from_box("large", columns, shape, {{0, at}, column});
      load(wanted, folder, loading);
    });
    expect_box(columns, {{0, at}, column}, places);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t gib = argc == 3 ? std::atoll(argv[1]) : 0;
  if (gib < 1) {
    std::fprintf(stderr, "usage: large_tensor GIB FOLDER\n");
    return 2;
  }
  int code = 0;
  try {
    run(gib, argv[2]);
    std::printf("%lld GiB: every loaded byte equals the saved one\n", static_cast<long long>(gib));
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = 1;
  }
  std::filesystem::remove_all(argv[2]);
  return code;
}
