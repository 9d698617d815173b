// Arrays of a template that their writer stored as objects.
#pragma once

#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// `wanted` with a null value for each plain tensor, and for each list, whose key the checkpoint has
// as an object: PyTorch pickles numpy's arrays, and lists that hold nothing else. The caller gets
// the object in its place.
StateDict as_stored(StateDict wanted, const Metadata& stored);

}  // namespace tilestone::engine
