// What a load takes below given paths of its tree: LoadOptions::subtrees and LoadOptions::complete.
//
// A key of the checkpoint is below a path when the writer's path of the key begins with it, or,
// where no path is recorded, when the key is the dotted path or goes on with a dot behind it.
#pragma once

#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// `wanted` with a node for everything that the checkpoint holds below one of `subtrees`: tensors
// without memory and null values. What has no recorded path is left out, and so is what has no
// place in the tree.
StateDict with_subtrees(StateDict wanted, const std::vector<Path>& subtrees,
                        const Metadata& stored);

// One rank's part of the check: which keys are below its `complete`, and which of those it does
// not ask for. Empty without `complete`.
Bytes left_out(const std::vector<Path>& complete, const Items& asked, const Metadata& stored);

// The coordinator's part: Error(kMismatch) when every rank that has a key below its `complete`
// leaves it out. Pipeline stages ask for parts of one model under one path.
void check_left_out(const std::vector<Bytes>& of_ranks, const Metadata& stored);

}  // namespace tilestone::engine
