// Measures the time that the CRC-32 adds to packing tensors into buffers. A save computes its
// checksums in that step.
//
//   checksum_cost MIB
//
// Packs MIB of memory into 32 buffers of 8 MiB, like a save's buffer pool, alternately with and
// without the CRC-32. Prints the medians as JSON: one line for one thread, one for all threads.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/geometry/strided_copy.h"

namespace {

using namespace tilestone;

constexpr size_t kBuffer = BufferPool::kDefaultBuffer;
constexpr size_t kBuffers = BufferPool::kDefaultTotal / kBuffer;
constexpr int kRounds = 7;

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Packing {
 public:
  explicit Packing(size_t blocks) : source_(blocks * kBuffer), buffers_(kBuffers * kBuffer) {
    for (size_t i = 0; i < source_.size(); ++i) source_[i] = static_cast<std::byte>(i * i >> 7);
    std::memset(buffers_.data(), 1, buffers_.size());
  }

  size_t bytes() const { return source_.size(); }

  void run(unsigned threads, bool with_checksum) {
    std::atomic<size_t> next = 0;
    std::vector<std::jthread> workers;
    for (unsigned i = 0; i < threads; ++i) {
      workers.emplace_back([&] {
        const size_t blocks = source_.size() / kBuffer;
        for (size_t block = next++; block < blocks; block = next++) pack(block, with_checksum);
      });
    }
  }

 private:
  void pack(size_t block, bool with_checksum) {
    const StridedView view =
        StridedView::contiguous(source_.data(), Dims{static_cast<int64_t>(source_.size())}, 1);
    const MutableByteView out(buffers_.data() + block % kBuffers * kBuffer, kBuffer);
    if (with_checksum) {
      checksum_ += pack_range_crc32(view, block * kBuffer, out, 0);
    } else {
      pack_range(view, block * kBuffer, out);
    }
  }

  Bytes source_;
  Bytes buffers_;
  std::atomic<uint32_t> checksum_ = 0;  // stored, so that the computation is not optimised away
};

void measure(Packing& packing, unsigned threads) {
  std::vector<double> plain;
  std::vector<double> checked;
  for (int round = 0; round < kRounds; ++round) {
    plain.push_back(seconds_of([&] { packing.run(threads, false); }));
    checked.push_back(seconds_of([&] { packing.run(threads, true); }));
  }
  std::printf("{\"threads\": %u, \"bytes\": %zu, \"seconds\": %.6f, \"with_crc_seconds\": %.6f}\n",
              threads, packing.bytes(), median(plain), median(checked));
}

}  // namespace

int main(int argc, char** argv) {
  const long mib = argc == 2 ? std::atol(argv[1]) : 0;
  if (mib < 8) {
    std::fprintf(stderr, "usage: checksum_cost MIB (at least 8)\n");
    return 2;
  }
  Packing packing(static_cast<size_t>(mib) / 8);
  measure(packing, 1);
  const unsigned all = std::max(1u, std::thread::hardware_concurrency());
  if (all > 1) measure(packing, all);
  return 0;
}
