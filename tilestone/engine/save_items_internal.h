// The first step of a save, which each rank does alone: converts its state to items and checks
// them.
#pragma once

#include <vector>

#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// Builds factories, drops non-persistent values, and returns the items.
Items items_of(const StateDict& state, const Dialect& dialect, const Format& format);

// Throws Error(kInvalidArgument), naming the key, if a tensor has no data or if tensor_attributes
// names a tensor that this rank does not have; also what Format::check() throws.
void check_items(const Items& items, const SaveOptions& options, const Format& format);

// The ranks whose chunks this rank copies (SaveOptions::replicate), ascending; empty: it copies
// nothing. Throws what checked_group() throws, Error(kInvalidArgument) if the group is missing, and
// kUnsupported if the format stores each chunk in its own file.
std::vector<int> replicate_group_of(const SaveOptions& options, const Format& format, int rank,
                                    int world_size);

// The names that SaveOptions::tp_replica_names asks for. Throws Error(kUnsupported) if the dialect
// or the format has no such names.
ReplicaNames replicas_to_name(const Items& items, const SaveOptions& options,
                              const Dialect& dialect, const Format& format);

// Sets PlanObject::content of the common objects, so that ranks can compare them.
void note_contents(const Items& items, const Format& format, LocalSavePlan& plan);

// For saves with copies: sets PlanObject::content of all objects except the dialect's common
// object, which the files of the index already duplicate.
void note_contents_of_copied(const Items& items, const Format& format, const Dialect& dialect,
                             LocalSavePlan& plan);
// Removes the copies that exceed SaveOptions::max_copy_bytes. Returns the cost of the remaining
// ones.
CopyCost settle_copies(const Items& items, const Format& format, const SaveOptions& options,
                       LocalSavePlan& plan, Assignment& assignment);

}  // namespace tilestone::engine
