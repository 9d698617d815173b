// Do the main replicas of all ranks hold everything, and each thing once? (Megatron-Core's access
// pattern: the number of main replicas of each part is one.) Replicas that are not the main one,
// and boxes without elements, hold nothing here: an empty box at the place of a full one is not
// taken for its replica. A pure function, as planning is.
#pragma once

#include <span>

#include "tilestone/base/bytes.h"
#include "tilestone/state/items.h"

namespace tilestone {

// What a rank holds or wants, as the bytes that are exchanged. Unlike a plan for saving (the same
// encoding) it may name a key or a box more than once. Error(kInvalidArgument) naming the key when
// a box lies outside its tensor.
Bytes encode_access(const Items& items);

// plans[r]: rank r's encode_access() or LocalSavePlan::encode(). Of tensors and objects that are
// common to all ranks the lowest rank that lists them holds the main replica. Objects whose key is
// KEY/shard_OFFSET_SHAPE are places of one grid of KEY. Throws, naming key, box or place, and
// ranks:
//  kMismatch - ranks disagree on a key's dtype or global shape, on the shape of a grid, or on
//      tensor versus object (or grid of objects);
//  kCoverage - elements of a tensor, or places of a grid, that two main replicas hold, or none;
//  kInvalidArgument - an object whose place lies outside its grid;
//  kCorrupt - what is no plan.
// Texts of kCoverage and kInvalidArgument begin as Megatron-Core's: "Invalid access pattern: ", or
// for objects that two main replicas hold "Duplicate ShardedObject keys: ".
void check_access(std::span<const ByteView> plans);

}  // namespace tilestone
