#include "tilestone/engine/write/reuse_internal.h"

#include <algorithm>
#include <numeric>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/error.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kWaste = 10;              // one part of so many of the checkpoint's bytes
constexpr uint64_t kPiece = 4u << 20;        // bytes that are packed or fetched at a time
constexpr uint64_t kBeforePaged = 5u << 10;  // bytes before an item that begins at a page
constexpr uint64_t kPaged = 64u << 10;       // bytes of an item from which on that is so
constexpr uint64_t kBefore = 64;             // bytes before another item

// What a checkpoint needs of a file that it could link.
struct Use {
  uint32_t file = 0;
  uint64_t bytes = 0;  // needed, and what lies before them
  uint64_t waste = 0;  // the rest of the file
};

std::vector<Use> uses_of(std::span<const UnchangedChunk> chunks,
                         std::span<const ReceiptFile> files) {
  std::vector<Use> uses(files.size());
  for (const UnchangedChunk& chunk : chunks) {
    if (!chunk.known || files[chunk.file].steps == 0 || files[chunk.file].steps >= kMaxSteps) {
      continue;
    }
    uses[chunk.file].bytes += chunk.length + (chunk.length < kPaged ? kBefore : kBeforePaged);
  }
  for (uint32_t file = 0; file < files.size(); ++file) {
    Use& use = uses[file];
    use.file = file;
    use.waste = files[file].size - std::min(files[file].size, use.bytes);
  }
  std::erase_if(uses, [](const Use& use) { return use.bytes == 0 || use.waste > use.bytes; });
  return uses;
}

// Gives the bytes of a C-contiguous copy of a tensor, piece by piece.
class Pieces {
 public:
  Pieces(const TensorView& tensor, BufferPool* pinned, const Deadline& deadline) : tensor_(tensor) {
    if (tensor.device != nullptr) {
      buffer_ = pinned->acquire(deadline);
      room_ = buffer_.space();
    } else if (!tensor.strided_view().is_contiguous()) {
      bytes_.resize(std::min(kPiece, tensor.bytes()));
      room_ = bytes_;
    }
  }

  // At most `size` bytes from `begin` on. Valid until the next call.
  ByteView next(uint64_t begin, uint64_t size) {
    if (room_.empty()) return {tensor_.data + begin, std::min(kPiece, size)};
    const MutableByteView out = room_.first(std::min<uint64_t>(room_.size(), size));
    if (tensor_.device != nullptr) {
      const DeviceCopy copy{tensor_.device, begin, out};
      copy_now(CopyTo::kHost, {&copy, 1});
    } else {
      pack_range(tensor_.strided_view(), begin, out);
    }
    return out;
  }

 private:
  const TensorView& tensor_;
  Buffer buffer_;
  Bytes bytes_;
  MutableByteView room_;
};

}  // namespace

std::vector<Way> ways_of(std::span<const UnchangedChunk> chunks, std::span<const ReceiptFile> files,
                         uint64_t share) {
  std::vector<Use> uses = uses_of(chunks, files);
  std::ranges::sort(uses, {}, &Use::waste);
  std::vector<bool> linked(files.size());
  uint64_t waste = 0;
  for (const Use& use : uses) {
    waste += use.waste;
    if (waste > share / kWaste) break;
    linked[use.file] = true;
  }
  std::vector<Way> ways;
  uint64_t apart = 0;
  for (const UnchangedChunk& chunk : chunks) {
    const bool links = chunk.known && linked[chunk.file];
    ways.push_back(links ? Way::kLinked : Way::kApart);
    if (!links) apart += chunk.length;
  }
  if (apart < kLeastApart) std::ranges::replace(ways, Way::kApart, Way::kWritten);
  return ways;
}

std::optional<Hash128> hash_if_unchanged(const TensorView& tensor, const ItemChecksums& sums,
                                         BufferPool* pinned, Deadline deadline) {
  const uint64_t size = tensor.bytes();
  const BlockSums one{size, size, {sums.payload_crc32}};
  const BlockSums& blocks = sums.blocks != nullptr ? *sums.blocks : one;
  if (size == 0 || blocks.bytes != size) return std::nullopt;
  Pieces pieces(tensor, pinned, deadline);
  Hasher128 hash;
  uint64_t at = 0;
  for (const uint32_t expected : blocks.crc32) {
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the deadline passed while comparing");
    }
    const uint64_t end = at + std::min(blocks.block_bytes, size - at);
    uint32_t crc = 0;
    while (at < end) {
      const ByteView bytes = pieces.next(at, end - at);
      crc = crc32(bytes, crc);
      at += bytes.size();
      if (at == end && crc != expected) return std::nullopt;
      hash.add(bytes);
    }
  }
  return hash.value();
}

void choose_ways(std::span<ReusableChunk> chunks, const EarlierStep& earlier, uint64_t share,
                 ThreadPool* threads, BufferPool* pinned, Deadline deadline) {
  const auto compare = [&](size_t i) {
    ReusableChunk& chunk = chunks[i];
    if (!chunk.earlier) return;
    const auto hash = hash_if_unchanged(*chunk.data, chunk.earlier->at.checksums, pinned, deadline);
    const Hash128& known = chunk.earlier->at.hash;
    if (!hash || (known && known != *hash)) {
      chunk.earlier.reset();
    } else {
      chunk.hash = *hash;
    }
  };
  if (threads != nullptr) {
    threads->parallel_for(chunks.size(), compare);
  } else {
    for (size_t i = 0; i < chunks.size(); ++i) compare(i);
  }
  std::vector<UnchangedChunk> unchanged;
  std::vector<ReusableChunk*> of;
  for (ReusableChunk& chunk : chunks) {
    if (!chunk.earlier) continue;
    const ReceiptItem& at = chunk.earlier->at;
    unchanged.push_back({chunk.earlier->file, at.length, static_cast<bool>(at.hash)});
    of.push_back(&chunk);
  }
  const std::vector<Way> ways = ways_of(unchanged, earlier.files(), share);
  for (size_t i = 0; i < ways.size(); ++i) of[i]->way = ways[i];
}

}  // namespace tilestone::engine
