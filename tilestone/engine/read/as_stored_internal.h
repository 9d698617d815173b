// Arrays, lists and dicts of a template that the checkpoint stores as objects.
#pragma once

#include <string>
#include <unordered_map>

#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// `wanted` with a null value in place of each plain tensor, each list, and each dict of nothing but
// values, whose key is an object in the checkpoint, and whose parts are not. The load then puts the
// object there. PyTorch pickles NumPy arrays and lists of nothing else as objects, and up to 2.3
// also dicts without tensors, as those of schedulers are.
// `replaced` receives the keys of such dicts, and of such lists that have elements, with what they
// are.
using KindsByKey = std::unordered_map<std::string, Value::Kind>;
StateDict as_stored(StateDict wanted, const Metadata& stored, KindsByKey& replaced);

// Error(kMismatch) if the loaded object is not of the kind that it replaces. A tuple is a list.
void expect_kind(const ObjectItem& item, Value::Kind kind);

}  // namespace tilestone::engine
