// Reading boxes of stored chunks into memory, with as few and as exact reads as that takes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// What a reader works with; all of it outlives the calls.
struct ReadContext {
  Storage& storage;
  const Format& format;
  const Metadata& metadata;
  std::shared_ptr<BufferPool> buffers;
  ThreadPool& threads;
  bool verify_checksums = true;
  Deadline deadline = Deadline::never();
  CachePolicy cache = CachePolicy::kBypass;
};

// Whether Tilestone wrote the checkpoint and its manifest is gone. A save that replaces a
// checkpoint removes its manifest first.
bool was_replaced(const ReadContext& context);

// A data file of the metadata, opened. Error(kNotFound) when it is gone, with a hint where another
// save may have replaced the checkpoint meanwhile.
std::unique_ptr<ReadableFile> open_data(const ReadContext& context, uint32_t file);

// A box of a stored chunk that goes to memory.
struct Transfer {
  uint32_t tensor = 0;  // index into Metadata::tensors
  uint32_t chunk = 0;   // index into its chunks
  Box box;              // in the chunk's own coordinates
  // Of box's shape, leading dims of size 1 dropped or not; another dtype is converted to.
  TensorView target;
};

// Fills the targets of all transfers. A chunk that is read whole is checked against its checksum:
// Error(kCorrupt) with key, file and offset. `progress` counts the bytes of the targets' boxes as
// stored.
void read_transfers(const ReadContext& context, std::span<const Transfer> transfers,
                    ProgressMeter& progress);

// Bytes that `transfers` ask for, as stored.
uint64_t stored_bytes(const Metadata& metadata, std::span<const Transfer> transfers);

// The items' bytes after decoding, in the order given; checked.
std::vector<Bytes> read_objects(const ReadContext& context,
                                std::span<const StoredObject* const> objects);

// `data` narrowed to `box`, which may have more leading dims of size 1 than `data`.
TensorView narrow_to(const TensorView& data, const Box& box);

// Zeros for all elements.
void fill_zero(const TensorView& target);

}  // namespace tilestone::engine
