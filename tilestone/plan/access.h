// Checks that the main replicas of all ranks together hold everything exactly once. (This is
// Megatron-Core's access pattern: each part has exactly one main replica.) Other replicas and boxes
// without elements do not count as holding anything: an empty box at the place of a non-empty one
// is not treated as its replica. A pure function, like all planning.
#pragma once

#include <span>

#include "tilestone/base/bytes.h"
#include "tilestone/state/items.h"

namespace tilestone {

// Encodes what a rank holds or wants, for the exchange between ranks. The encoding is that of a
// save plan, but the same key or box may occur more than once. Throws Error(kInvalidArgument),
// naming the key, if a box lies outside its tensor.
Bytes encode_access(const Items& items);

// plans[r] is rank r's encode_access() or LocalSavePlan::encode(). The main replica of a tensor or
// object that is common to all ranks is on the lowest rank that lists it. Objects whose key is
// KEY/shard_OFFSET_SHAPE are cells of one grid of KEY. Throws, naming key, box or cell, and
// ranks:
//  kMismatch - ranks disagree on a key's dtype or global shape, on the shape of a grid, or on
//      whether it is a tensor, an object or a grid of objects;
//  kCoverage - elements of a tensor, or a cell of a grid, are held by two main replicas or none;
//  kInvalidArgument - an object's cell lies outside its grid;
//  kCorrupt - the bytes are not a plan.
// Like Megatron-Core's, messages of kCoverage and kInvalidArgument begin with "Invalid access
// pattern: ", or with "Duplicate ShardedObject keys: " for an object that two main replicas hold.
void check_access(std::span<const ByteView> plans);

}  // namespace tilestone
