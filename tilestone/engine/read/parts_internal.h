// Cutting a box of a stored tensor into the byte ranges that are read.
#pragma once

#include <cstdint>
#include <functional>

#include "tilestone/format/format.h"

namespace tilestone::engine {

// A part of a stored chunk that is read as one range.
struct Part {
  Box box;              // in the chunk's own coordinates
  uint64_t offset = 0;  // of the box's first element, from the item's start, bytes
  uint64_t size = 0;    // from its first to the end of its last element, bytes
};

// Elements to bytes. All arithmetic on strides and shape is checked here, once: what passes can't
// overflow later. Error(kCorrupt) when elements lie outside [0, limit) of the item.
void check_payload(const StoredPayload& payload, uint64_t limit);

// True when the elements fill their record without a gap, in whatever order of dims: reading the
// parts of the whole chunk, in order, is then reading the record.
bool fills_record(const StoredPayload& payload);
// The same of the elements of all chunks in the chunk's item: read in their order.
bool fills_record(const StoredChunk& chunk, const StoredPayload& payload);

// Emits the parts of `box` (inside the payload's shape) in ascending order of their offsets.
// Their boxes tile `box`; each is at most max_bytes long (at least one element). Rows of elements
// that lie apart are read together only where the bytes between them are few: what is read stays
// within a thirty-second of what is needed, but for rows that are nearer than a page to one
// another, which cost a page each anyway.
void split(const StoredPayload& payload, const Box& box, uint64_t max_bytes,
           const std::function<void(Part)>& emit);

}  // namespace tilestone::engine
