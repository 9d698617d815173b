// Arrays, lists and dicts of a template that the checkpoint stores as objects.
#pragma once

#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// `wanted` with a null value in place of each plain tensor, each list, and each dict of nothing but
// values, whose key is an object in the checkpoint, and whose parts are not. The load then puts the
// object there. PyTorch pickles NumPy arrays and lists of nothing else as objects, and up to 2.3
// also dicts without tensors, as those of schedulers are.
StateDict as_stored(StateDict wanted, const Metadata& stored);

}  // namespace tilestone::engine
