// What a load reads below given paths of its tree: LoadOptions::subtrees, LoadOptions::complete,
// and the dicts and lists that a template has.
//
// A key of the checkpoint is below a path when the path that the writer recorded for the key begins
// with it. If no path is recorded: when the key is the dotted path, or the dotted path followed by
// a dot and more.
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// How the state of an optimizer is created before a load, for hints of errors.
inline constexpr std::string_view kHintAtOptimizers =
    "for an optimizer with DTensors (FSDP2), torch.distributed.checkpoint.state_dict."
    "get_optimizer_state_dict(model, optimizer) creates it by a step with zero gradients, which "
    "AdamW counts; the load sets the counter to the stored one, so call it only if there is a "
    "checkpoint to load, or training begins with step 1";

// `wanted` with a node for everything that the checkpoint has below one of `subtrees`: tensors
// without memory, and null values for objects. Leaves out what has no recorded path and what does
// not fit into the tree. An empty list becomes one of nodes.
StateDict with_subtrees(StateDict wanted, const std::vector<Path>& subtrees,
                        const Metadata& stored);

// Whether a node is a value that is a list without elements.
bool is_empty_list(const StateNode& node);

// One rank's part of the check, as a message: which keys are below its `complete` paths, and which
// of these it does not request. Empty without `complete`.
Bytes left_out(const std::vector<Path>& complete, const Items& asked, const Metadata& stored);

// The coordinator's part: Error(kMismatch) if a key is requested by none of the ranks that have it
// below their `complete` paths. A request of one of them is enough, because pipeline stages request
// different parts of one model under the same path.
void check_left_out(const std::vector<Bytes>& of_ranks, const Metadata& stored);

// The dicts and lists of a template, except the root: by the paths of the items that it asks for,
// and of its empty dicts.
class NamedPaths {
 public:
  explicit NamedPaths(const Items& asked);
  // Whether a key of the checkpoint is one of them or below one.
  bool hold(const std::string& key, const Path& path) const;

 private:
  std::unordered_set<std::string> paths_;  // dotted
};

}  // namespace tilestone::engine
