#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/huge_pages.h"
#include "tilestone/engine/write/stage_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kPage = BufferPool::kAlignment;
constexpr uint64_t kPlacedFrom = 64u << 10;  // bytes; the phase of smaller tensors does not matter
constexpr uint64_t kSmallStep = 64;          // bytes
constexpr uint64_t kStagedBlock = 8u << 20;  // bytes that one thread copies or touches at a time

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

void touch(std::byte* memory, uint64_t bytes, ThreadPool& threads) {
  threads.parallel_for((bytes + kStagedBlock - 1) / kStagedBlock, [&](size_t block) {
    const uint64_t begin = block * kStagedBlock;
    const uint64_t end = std::min(bytes, begin + kStagedBlock);
    for (uint64_t at = begin; at < end; at += kPage) std::memset(memory + at, 0, 1);
  });
}

void check_time(const Deadline& deadline) {
  if (deadline.expired()) throw Error(ErrorCode::kTimeout, "the deadline passed while staging");
}

// One thread's part of the copies from host memory.
struct Copy {
  const TensorView* from;
  std::byte* to;
  uint64_t begin;  // byte offsets in the C-contiguous tensor
  uint64_t end;
  const std::string* key;
};

void run(const Copy& copy, const Deadline& deadline) {
  with_key(*copy.key, [&] {
    check_time(deadline);
    pack_range(copy.from->strided_view(), copy.begin, {copy.to, copy.end - copy.begin});
  });
}

}  // namespace

void StagingMemory::reserve(uint64_t bytes, ThreadPool* threads) {
  used_ = 0;
  if (bytes <= capacity_) return;
  memory_.reset();
  capacity_ = 0;
  is_touched_ = is_pinned_ = false;
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
  is_touched_ = threads != nullptr;
  if (is_touched_) touch(memory_.get(), size, *threads);
}

void StagingMemory::pin(const PinHost& pin, ThreadPool* threads) {
  if (!pin || is_pinned_ || capacity_ == 0) return;
  if (!is_touched_ && threads != nullptr) touch(memory_.get(), capacity_, *threads);
  is_touched_ = is_pinned_ = true;
  memory_ = pin(memory_, capacity_);
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

uint64_t staging_room(uint64_t bytes) {
  if (bytes == 0) return 0;
  return checked_add(bytes, bytes < kPlacedFrom ? kSmallStep : kPage, "bytes to stage");
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
    bytes = checked_add(bytes, staging_room(pieces[chunk]->data.bytes()), "bytes to stage");
  }
  return bytes;
}

PinHost pin_for(const Items& items, const LocalSavePlan& plan, const Assignment& assignment) {
  const auto pieces = pieces_of(items, plan);
  for (const uint32_t chunk : written_chunks(assignment)) {
    const TensorView& data = pieces[chunk]->data;
    if (data.device != nullptr && data.bytes() > 0) return data.device->pin();
  }
  return {};
}

namespace {

std::vector<LiveTensor> live_tensors(const LocalSavePlan& plan,
                                     const std::vector<uint32_t>& written,
                                     const std::vector<TensorView>& from) {
  std::vector<LiveTensor> live;
  for (size_t i = 0; i < written.size(); ++i) {
    live.push_back({&plan.tensors[plan.chunks[written[i]].tensor].key, &from[i]});
  }
  return live;
}

// Whether each of the tensors is copied later.
std::vector<bool> copied_later(const std::vector<LiveTensor>& written, const WatchTensors* watch) {
  std::vector<bool> later(written.size(), false);
  if (watch == nullptr) return later;
  std::vector<size_t> full;
  std::vector<LiveTensor> asked;
  for (size_t i = 0; i < written.size(); ++i) {
    if (written[i].data->bytes() == 0) continue;
    full.push_back(i);
    asked.push_back(written[i]);
  }
  const std::vector<bool> answer = watch->watch(asked);
  for (size_t i = 0; i < full.size(); ++i) later[full[i]] = answer.at(i);
  return later;
}

// From devices, and from host memory with the threads meanwhile.
void copy_all(Fetching& fetching, const std::vector<Copy>& copies, ThreadPool* threads,
              const Deadline& deadline) {
  const size_t first = fetching.empty() ? 0 : 1;  // index 0 is the fetching, if there is any
  const auto one = [&](size_t index) {
    if (index < first) return fetching.run(deadline);
    run(copies[index - first], deadline);
  };
  if (threads != nullptr) {
    threads->parallel_for(first + copies.size(), one);
  } else {
    for (size_t index = 0; index < first + copies.size(); ++index) one(index);
  }
}

void add_blocks(std::vector<Copy>& copies, const TensorView& data, std::byte* to,
                const std::string& key) {
  const uint64_t bytes = data.bytes();
  for (uint64_t begin = 0; begin < bytes; begin += kStagedBlock) {
    copies.push_back({&data, to + begin, begin, std::min(bytes, begin + kStagedBlock), &key});
  }
}

// Each written piece has its data in the staging memory then, and the others have none.
void point_to_copies(const std::vector<Piece*>& pieces, const std::vector<uint32_t>& written,
                     const std::vector<TensorView>& from, const std::vector<std::byte*>& to) {
  for (Piece* piece : pieces) {
    piece->data = TensorView::without_data(piece->data.dtype, piece->data.shape);
  }
  for (size_t i = 0; i < written.size(); ++i) {
    if (to[i] == nullptr) continue;
    pieces[written[i]]->data = TensorView::contiguous(to[i], from[i].dtype, from[i].shape);
  }
}

}  // namespace

StagedLater stage_tensors(Items& items, const LocalSavePlan& plan, const Assignment& assignment,
                          StagingMemory& memory, ThreadPool* threads, Deadline deadline,
                          const WatchTensors* watch) {
  memory.pin(pin_for(items, plan, assignment), threads);
  const auto pieces = pieces_of(items, plan);
  const std::vector<uint32_t> written = written_chunks(assignment);
  std::vector<TensorView> from;  // the pieces' present data
  for (const uint32_t chunk : written) from.push_back(pieces[chunk]->data);
  const std::vector<LiveTensor> live = live_tensors(plan, written, from);
  std::vector<std::byte*> to;
  const std::vector<bool> later = copied_later(live, watch);
  StagedLater late;
  std::vector<Copy> copies;
  std::vector<size_t> far;  // on devices, to be copied later
  Fetching fetching;
  for (size_t i = 0; i < written.size(); ++i) {
    const TensorView& data = from[i];
    const uint64_t bytes = data.bytes();
    to.push_back(bytes == 0 ? nullptr : memory.take(bytes, phase_of(data)).data());
    const std::string& key = *live[i].key;
    if (data.device != nullptr) {
      later[i] ? far.push_back(i) : fetching.add(data, to.back(), key);
    } else if (later[i]) {
      late.copies.push_back({key, data, to.back()});
    } else {
      add_blocks(copies, data, to.back(), key);
    }
  }
  late.is_watched = !late.copies.empty() || !far.empty();
  if (watch != nullptr) {
    fetching.submit_ahead(deadline, watch->delay_program);
    for (const size_t i : far) fetching.add(from[i], to[i], *live[i].key);
    fetching.submit(deadline);
    late.fetching = std::exchange(fetching, {});
  }
  copy_all(fetching, copies, threads, deadline);
  point_to_copies(pieces, written, from, to);
  return late;
}

}  // namespace tilestone::engine
