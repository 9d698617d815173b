// Cuts a box of a stored tensor into the byte ranges to read.
#pragma once

#include <cstdint>
#include <functional>

#include "tilestone/format/format.h"

namespace tilestone::engine {

// A part of a stored chunk that is read as one range.
struct Part {
  Box box;              // in the chunk's own coordinates
  uint64_t offset = 0;  // of the box's first element, from the start of the item, bytes
  uint64_t size = 0;    // from the start of the first element to the end of the last, bytes
};

// Checks all arithmetic on the payload's strides and shape once, so that it can't overflow later.
// Error(kCorrupt) when elements lie outside the bytes [0, limit) of the item.
void check_payload(const StoredPayload& payload, uint64_t limit);

// True when the elements fill their record without a gap, in any order of dims. Reading the parts
// of the whole chunk in order then reads the whole record.
bool fills_record(const StoredPayload& payload);
// The same for a chunk that may be a part of its item: all chunks of the item together fill the
// record, and reading them in order reads it.
bool fills_record(const StoredChunk& chunk, const StoredPayload& payload);

// Emits the parts of `box` (inside the payload's shape) in ascending order of their offsets. Their
// boxes tile `box`. Each part has at most max_bytes bytes, but at least one element. Rows with gaps
// between them are read together only if a gap adds at most 1/32 to the needed bytes, or if the
// rows start at most a page apart (kSpareShare and kJoinedStep in plan/exchange_plan.h).
void split(const StoredPayload& payload, const Box& box, uint64_t max_bytes,
           const std::function<void(Part)>& emit);

}  // namespace tilestone::engine
