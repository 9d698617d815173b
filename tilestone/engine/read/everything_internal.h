// Loading a whole checkpoint without a template.
#pragma once

#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// Everything in the checkpoint: each tensor as a whole, without memory, and each object.
Items all_items(const Metadata& stored);

// Allocates memory for the tensors of all_items(). First checks that the files are large enough for
// the tensors that the metadata describes; otherwise Error(kCorrupt).
void give_memory(Items& items, const ReadContext& context);

// Builds the tree of the loaded items. Each is placed at its recorded path, or, if it has none, at
// the top under its key. A container whose elements are the ints 0 to n - 1 is a list; one with
// other ints is a dict. The common state is merged in. Error(kUnsupported), naming the key, if two
// items have the same place.
StateDict tree_of(Items items);

}  // namespace tilestone::engine
