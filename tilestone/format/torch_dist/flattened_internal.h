// Tensors that Megatron-Core up to 0.15 stored flattened, as the tensors that they were.
#pragma once

#include "tilestone/geometry/dims.h"
#include "tilestone/state/metadata.h"

namespace tilestone::torch_dist {

// Gives a tensor, as `.metadata` describes its stored form, its original shape, and each stored
// chunk the boxes of the original tensor that it is: they become chunks of one item (FlatPart).
// Error(kCorrupt) when the stored form is none of this shape, or its chunks overlap;
// Error(kUnsupported) for more dims than any writer has used.
void restore_original(StoredTensor& tensor, const Dims& original);

}  // namespace tilestone::torch_dist
