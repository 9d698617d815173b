// Arrays and lists of a template that the checkpoint stores as objects.
#pragma once

#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// `wanted` with a null value in place of each plain tensor and each list whose key is an object in
// the checkpoint. The load then puts the object there. PyTorch pickles NumPy arrays, and lists of
// nothing else, as objects.
StateDict as_stored(StateDict wanted, const Metadata& stored);

}  // namespace tilestone::engine
