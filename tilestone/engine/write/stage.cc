#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/huge_pages.h"
#include "tilestone/engine/write/stage_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kPage = BufferPool::kAlignment;
constexpr uint64_t kPlacedFrom = 64u << 10;  // bytes; the phase of smaller tensors does not matter
constexpr uint64_t kSmallStep = 64;          // bytes
constexpr uint64_t kBlock = 8u << 20;        // bytes that one thread copies or touches at a time

// The piece of each chunk of the local plan, by the chunk's number.
template <typename AnyItems>
auto pieces_of(AnyItems& items, const LocalSavePlan& plan) {
  std::vector<decltype(&items.tensors.front().pieces.front())> pieces;
  pieces.reserve(plan.chunks.size());
  for (auto& item : items.tensors) {
    for (auto& piece : item.pieces) pieces.push_back(&piece);
  }
  if (pieces.size() == plan.chunks.size()) return pieces;
  throw Error(ErrorCode::kInternal, "the local plan has " + std::to_string(plan.chunks.size()) +
                                        " chunks for " + std::to_string(pieces.size()) + " pieces");
}

// The tensor's offset within a page; nullopt if it does not influence the tensor's place in a file.
std::optional<uint64_t> phase_of(const TensorView& tensor) {
  if (tensor.bytes() < kPlacedFrom) return std::nullopt;
  return tensor.device == nullptr ? reinterpret_cast<uintptr_t>(tensor.data) % kPage : 0;
}

uint64_t room_for(const TensorView& tensor) {
  return tensor.bytes() + (tensor.bytes() < kPlacedFrom ? kSmallStep : kPage);
}

void touch(std::byte* memory, uint64_t bytes, ThreadPool& threads) {
  threads.parallel_for((bytes + kBlock - 1) / kBlock, [&](size_t block) {
    const uint64_t begin = block * kBlock;
    const uint64_t end = std::min(bytes, begin + kBlock);
    for (uint64_t at = begin; at < end; at += kPage) std::memset(memory + at, 0, 1);
  });
}

// One thread's part of the copy.
struct Copy {
  const TensorView* from;
  std::byte* to;
  uint64_t begin;  // byte offsets in the C-contiguous tensor
  uint64_t end;
  const std::string* key;
};

void add_copies(const TensorView& from, std::byte* to, const std::string& key,
                std::vector<Copy>& copies) {
  const uint64_t bytes = from.bytes();
  // A device tensor is copied by one call.
  const uint64_t step = from.device == nullptr ? kBlock : std::max<uint64_t>(bytes, 1);
  for (uint64_t begin = 0; begin < bytes; begin += step) {
    copies.push_back({&from, to + begin, begin, std::min(bytes, begin + step), &key});
  }
}

// Reads device memory from one thread at a time.
void run(const Copy& copy, std::mutex& device, const Deadline& deadline) {
  try {
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the deadline passed while staging");
    }
    const MutableByteView out(copy.to, copy.end - copy.begin);
    if (copy.from->device != nullptr) {
      const std::lock_guard lock(device);
      return copy.from->device->to_host(copy.begin, out);
    }
    pack_range(copy.from->strided_view(), copy.begin, out);
  } catch (...) {
    throw current_error().with_key(*copy.key);
  }
}

}  // namespace

void StagingMemory::reserve(uint64_t bytes, ThreadPool* threads) {
  used_ = 0;
  if (bytes <= capacity_) return;
  memory_.reset();
  capacity_ = 0;
  const uint64_t size = align_up(bytes, kPage);
  void* const memory =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorCode::kIo,
                "can't allocate memory to stage " + std::to_string(bytes) + " bytes")
        .with_errno(errno);
  }
  prefer_huge_pages(memory, size);
  memory_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(memory),
                                       [size](std::byte* mapped) { ::munmap(mapped, size); });
  capacity_ = size;
  if (threads != nullptr) touch(memory_.get(), size, *threads);
}

MutableByteView StagingMemory::take(uint64_t bytes, std::optional<uint64_t> phase) {
  uint64_t at = align_up(used_, kSmallStep);
  if (phase) at = used_ / kPage * kPage + *phase;
  if (at < used_) at += kPage;
  if (at + bytes > capacity_) {
    throw Error(ErrorCode::kInternal, "staging needs more memory than was reserved");
  }
  used_ = at + bytes;
  return {memory_.get() + at, bytes};
}

std::vector<uint32_t> written_chunks(const Assignment& assignment) {
  std::vector<uint32_t> chunks = assignment.chunks;
  chunks.insert(chunks.end(), assignment.copies.begin(), assignment.copies.end());
  return chunks;
}

uint64_t staging_bytes(const Items& items, const LocalSavePlan& plan,
                       const Assignment& assignment) {
  const auto pieces = pieces_of(items, plan);
  uint64_t bytes = 0;
  for (const uint32_t chunk : written_chunks(assignment)) {
    bytes = checked_add(bytes, room_for(pieces[chunk]->data), "bytes to stage");
  }
  return bytes;
}

void stage_tensors(Items& items, const LocalSavePlan& plan, const Assignment& assignment,
                   StagingMemory& memory, ThreadPool* threads, Deadline deadline) {
  const auto pieces = pieces_of(items, plan);
  const std::vector<uint32_t> written = written_chunks(assignment);
  std::vector<TensorView> from;  // the pieces' present data
  from.reserve(written.size());
  std::vector<Copy> copies;
  for (const uint32_t chunk : written) {
    from.push_back(pieces[chunk]->data);
    const uint64_t bytes = from.back().bytes();
    if (bytes == 0) continue;
    add_copies(from.back(), memory.take(bytes, phase_of(from.back())).data(),
               plan.tensors[plan.chunks[chunk].tensor].key, copies);
  }
  std::mutex device;
  const auto one = [&](size_t index) { run(copies[index], device, deadline); };
  if (threads != nullptr) {
    threads->parallel_for(copies.size(), one);
  } else {
    for (size_t index = 0; index < copies.size(); ++index) one(index);
  }
  for (Piece* piece : pieces) {
    piece->data = TensorView::without_data(piece->data.dtype, piece->data.shape);
  }
  for (const Copy& copy : copies) {
    if (copy.begin > 0) continue;
    Piece& piece = *pieces[written[static_cast<size_t>(copy.from - from.data())]];
    piece.data = TensorView::contiguous(copy.to, copy.from->dtype, copy.from->shape);
  }
}

}  // namespace tilestone::engine
