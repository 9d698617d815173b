// The torch dialect: a tree as the items that torch.distributed.checkpoint would make of it, and
// back. The rules are torch 2.13's flatten_state_dict:
//  - a dict is descended, its keys as text; an empty one leaves nothing;
//  - a list is descended when it holds, at any depth of lists, a tensor, a sharded entity or a
//  dict;
//    else the whole list is one object;
//  - everything else (a tuple, whatever it holds) is a leaf, its key the dotted path.
// A sharded tensor or object has its own key instead. A path is recorded where it is the key.
#pragma once

#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::torch_dist {

Items to_items(const StateDict& state);
StateDict from_items(const StateDict& original, const Items& loaded);

}  // namespace tilestone::torch_dist
