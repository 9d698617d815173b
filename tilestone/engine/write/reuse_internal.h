// Nothing is written twice: which of a rank's chunks an earlier checkpoint already has.
//
// A chunk is unchanged if the CRC-32 of each of its blocks is that of the earlier chunk. The first
// block that differs ends the comparison, so that of changed data little is read twice. A chunk
// that is unchanged for the first time is written once more, into a file of its own kind, with a
// hash of 128 bits in the receipt. From the next save on, if the hash is equal too, that file is
// linked into the new checkpoint (Storage::link), under a name of the new save, and nothing is
// written. So leftovers, removals and copies of a checkpoint need to know nothing of links.
//
// At most kMaxSteps checkpoints in a row share a file, so that a bad block harms no more of them.
// A file of which the checkpoint needs too little is not linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/write/earlier_step_internal.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/state/tensor_view.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

inline constexpr uint32_t kMaxSteps = 20;            // that share a file
inline constexpr uint64_t kLeastReused = 16u << 10;  // bytes of a chunk; less is always written
inline constexpr uint64_t kLeastApart = 1u
                                        << 20;  // bytes; for fewer a file of their own costs more

// What a save does with a chunk.
enum class Way : uint8_t {
  kWritten,  // with everything else
  kApart,    // written into a file that later checkpoints may share
  kLinked,
};

// A chunk that is unchanged.
struct UnchangedChunk {
  uint32_t file = 0;    // of the earlier checkpoint
  uint64_t length = 0;  // of the item, bytes
  bool known = false;   // by its hash, too
};
// What to do with each of them. `files`: of the earlier checkpoint. `share`: bytes of all chunks
// that the rank has in the new checkpoint.
std::vector<Way> ways_of(std::span<const UnchangedChunk> chunks, std::span<const ReceiptFile> files,
                         uint64_t share);

// The hash of a tensor's bytes if they have these checksums; nullopt: they differ. `pinned`: for
// tensors in device memory.
std::optional<Hash128> hash_if_unchanged(const TensorView& tensor, const ItemChecksums& sums,
                                         BufferPool* pinned, Deadline deadline);

// A chunk that the rank is about to save.
struct ReusableChunk {
  const TensorView* data = nullptr;
  std::optional<EarlierItem> earlier = std::nullopt;  // nullopt: it is written
  Way way = Way::kWritten;
  Hash128 hash = {};  // of an unchanged chunk
};

// Sets `way` and `hash` of each chunk. `threads` may be null: the calling thread compares.
void choose_ways(std::span<ReusableChunk> chunks, const EarlierStep& earlier, uint64_t share,
                 ThreadPool* threads, BufferPool* pinned, Deadline deadline);

}  // namespace tilestone::engine
