// Reading boxes of stored chunks into memory, with as few and as exact reads as that takes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tilestone/engine/read/context_internal.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/state/metadata.h"

namespace tilestone::engine {

// A box of a stored chunk that goes to memory.
struct Transfer {
  uint32_t tensor = 0;  // index into Metadata::tensors
  uint32_t chunk = 0;   // index into its chunks
  Box box;              // in the chunk's own coordinates
  // Of box's shape, leading dims of size 1 dropped or not; another dtype is converted to.
  TensorView target;
  uint32_t copy = kNoCopy;  // where it is read: index into Metadata::copies, or the chunk's item
  // The chunk's own item is known as damaged: all of its substitute is read, and checked.
  bool substitute = false;
};

// Fills the targets of all transfers. A chunk that is read whole is checked against its checksum: a
// damaged one is read from another place that holds it, whole and checked again, with a warning
// that names key and file, or is Error(kCorrupt) with key, file and offset where none is left. So
// is one that the disk can't read (is_unreadable; where none is left, with that error), and one
// whose file is missing or too short (lost_files_internal.h). `progress` counts the bytes of the
// targets' boxes as stored, but not those of substitutes: they were counted before.
void read_transfers(const ReadContext& context, std::span<const Transfer> transfers,
                    ProgressMeter& progress);

// Bytes that `transfers` ask for, as stored.
uint64_t stored_bytes(const Metadata& metadata, std::span<const Transfer> transfers);

// An object, and where it is read: its own item, or the copy that is `place` less one.
struct ObjectRead {
  const StoredObject* stored = nullptr;
  size_t place = 0;
};

// The items' bytes after decoding, in the order given; checked. What is damaged or unreadable at
// its place, or whose file is missing or too short, is read from another place that holds it, with
// a warning; the error is thrown where none is left.
std::vector<Bytes> read_objects(const ReadContext& context, std::span<const ObjectRead> objects);

// `data` narrowed to `box`, which may have more leading dims of size 1 than `data`.
TensorView narrow_to(const TensorView& data, const Box& box);

// Zeros for all elements.
void fill_zero(const TensorView& target);

}  // namespace tilestone::engine
