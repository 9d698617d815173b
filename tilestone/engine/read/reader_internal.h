// Reads boxes of stored chunks into memory, with few reads and few unneeded bytes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tilestone/engine/read/context_internal.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/plan/load_plan.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"

namespace tilestone::engine {

// A box of a stored chunk that is read into memory.
struct Transfer {
  uint32_t tensor = 0;  // index into Metadata::tensors
  uint32_t chunk = 0;   // index into its chunks
  Box box;              // in the chunk's own coordinates
  // Has the box's shape, with or without its leading dims of size 1. If its dtype is not the stored
  // one, the elements are converted.
  TensorView target;
  uint32_t copy = kNoCopy;  // where it is read: index into Metadata::copies; kNoCopy: its own item
  // The chunk's own item is known to be damaged: it is read from `copy`, and checked; the whole
  // chunk if it has no blocks (state/chunk_blocks.h).
  bool substitute = false;
  // Another rank has checked all blocks that the box touches: exactly the box is read.
  bool checked = false;
};

// The plan's reads, into the memory of the items' pieces. `items`: those that were planned.
std::vector<Transfer> transfers_of(const LoadPlan& plan, std::span<const TensorItem> items,
                                   const Metadata& metadata);

// Fills the targets of all transfers, and finishes context.device_writes. With verify_checksums a
// chunk with blocks (state/chunk_blocks.h) is read by whole blocks, and each is checked, unless
// another rank has done that (Transfer::checked). Of other chunks exactly the boxes are read, and a
// chunk that is read whole is checked against its checksum; that parts are not checked is logged
// once. A damaged chunk is read from another place that holds it, and checked again, with a warning
// that names key and file. If no place is left: Error(kCorrupt) with key, file and range of bytes.
// The same is done for a chunk that the disk can't read (is_unreadable(); that error is thrown if
// no place is left), and for one whose file is missing or too short (lost_files_internal.h).
// `progress` counts the bytes of the transfers' boxes as stored, without substitutes, which were
// counted before.
void read_transfers(const ReadContext& context, std::span<const Transfer> transfers,
                    ProgressMeter& progress);

// The number of bytes in the boxes of `transfers`, as stored.
uint64_t stored_bytes(const Metadata& metadata, std::span<const Transfer> transfers);

// An object, and where it is read: place 0 is its own item, place i is copy i - 1.
struct ObjectRead {
  const StoredObject* stored = nullptr;
  size_t place = 0;
};

// The objects' items after decoding, checked, in the order of `objects`. An object that is damaged
// or unreadable, or whose file is missing or too short, is read from another place that holds it,
// with a warning. If no place is left, the error is thrown.
std::vector<Bytes> read_objects(const ReadContext& context, std::span<const ObjectRead> objects);

// `data` narrowed to `box`, which may have additional leading dims of size 1.
TensorView narrow_to(const TensorView& data, const Box& box);

// Sets all elements to zero.
void fill_zero(const TensorView& target);

}  // namespace tilestone::engine
