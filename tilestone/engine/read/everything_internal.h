// A whole checkpoint without a template.
#pragma once

#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// All that the checkpoint holds: each tensor whole, without memory, and each object.
Items all_items(const Metadata& stored);

// Memory for the tensors of all_items(). Error(kCorrupt), before any is taken, where the files are
// too small for what the metadata promises.
void give_memory(Items& items, const ReadContext& context);

// The tree that the loaded items make: each at its recorded path, and under its key at the top
// where none is recorded. What stands under 0 to n - 1 of one container makes a list; under other
// ints, a dict of them. Common state is merged in. Error(kUnsupported) naming the key where two
// items claim one place.
StateDict tree_of(Items items);

}  // namespace tilestone::engine
