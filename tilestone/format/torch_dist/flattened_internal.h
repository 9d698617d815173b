// Restores the original shape of tensors that Megatron-Core up to 0.15 stored flattened.
#pragma once

#include "tilestone/geometry/box.h"
#include "tilestone/state/metadata.h"

namespace tilestone::torch_dist {

// `tensor` has the stored (flattened) shape and chunks, as in `.metadata`. Sets its shape to
// `original`. Replaces each stored chunk by the boxes of the original tensor that it contains;
// these are chunks of one item (FlatPart). Error(kCorrupt) if the stored shape contradicts
// `original` or chunks overlap. Error(kUnsupported) for more dims than any writer has used.
void restore_original(StoredTensor& tensor, const Dims& original);

}  // namespace tilestone::torch_dist
