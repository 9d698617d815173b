// One rank's share of a save, and the first step of a save, which each rank does alone: it converts
// its state to items, checks them and notes what the other ranks need to know of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/contents.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/items.h"
#include "tilestone/state/list_lengths.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// What a rank saves, and after planning what it writes. Tensor memory belongs to the caller unless
// it was staged; everything else is owned.
struct SaveShare {
  SaveOptions options;
  std::shared_ptr<const Format> format;    // of the options; see set_options()
  std::shared_ptr<const Dialect> dialect;  // likewise
  Items items;
  std::vector<ListLength> lists = {};  // of the tree; see set_state()
  LocalSavePlan local;                 // of the items
  Assignment assignment;               // indices into `local`: what this rank writes
  bool list_held = false;              // see WriteTask::list_held
  int rank = 0;
  int world_size = 1;
  bool one_writer = false;  // RequestView::one_writer
  std::string save_id;

  uint64_t bytes() const;  // elements of the assigned tensors, including copies
};

// Sets the options, and the format and dialect that they name.
void set_options(SaveShare& share, const SaveOptions& options);

// Builds factories, drops non-persistent values, and returns the items in the share's dialect and
// format.
Items items_of(const StateDict& state, const SaveShare& share);

// Throws Error(kInvalidArgument), naming the key, if a tensor has no data or if tensor_attributes
// names a tensor that this rank does not have, or if a file's path would be too long at the
// location; also what Format::check() throws.
void check_items(const SaveShare& share, const Storage& location);

// The names that SaveOptions::tp_replica_names asks for. Throws Error(kUnsupported) if the dialect
// or the format has no such names.
ReplicaNames replicas_to_name(const SaveShare& share);

// The items of the state, as items_of() returns them, and the lengths of its lists.
void set_state(SaveShare& share, const StateDict& state);

// Sets PlanObject::content of the objects and PlanChunk::content of the chunks that ranks compare
// (plan/contents.h), and of the further chunks that have one of `groups`. No rank compares chunks
// with itself: those of a save of one rank get no content. The dialect's common object is left out
// if `without_common` is true.
void note_contents(SaveShare& share, bool without_common, const ContentGroups& groups = {});
// Sets the contents of these chunks.
void note_chunks(SaveShare& share, const std::vector<uint32_t>& chunks);

// ---- Copies

// The ranks whose chunks this rank copies (SaveOptions::copies), ascending; empty: it copies
// nothing. Throws what checked_group() throws, Error(kInvalidArgument) if the group is missing, and
// kUnsupported if the format stores each chunk in its own file.
std::vector<int> replicate_group_of(const SaveShare& share);
// For saves with copies: sets PlanObject::content of all objects except the dialect's common
// object, which the files of the index already duplicate.
void note_contents_of_copied(SaveShare& share);
// Removes the copies that exceed LocalCopies::max_bytes from the assignment. The result gets the
// number of the others, and their bytes: of elements and of objects' items.
void limit_and_count_copies(SaveShare& share, SaveResult& result);

// ---- Who writes what, beyond the planners of plan/

// What this rank writes of share.local, by rule.
Assignment plan_by_rule(const SaveShare& share);
// What a rank writes in torch's rank-local mode: everything that it holds, except empty boxes of
// tensors that have elements.
Assignment all_that_is_held(const LocalSavePlan& plan);

// For formats with grids: sets TensorItem::chunk_shape. `grids`: one for each tensor of the local
// plan. Also leaves out empty chunks, which have no file; the index lists the tensor anyway.
void set_grids(SaveShare& share, const std::vector<Dims>& grids);

}  // namespace tilestone::engine
