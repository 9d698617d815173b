// What a rank brings to a save, taken apart: the first step, which no other rank has a part in.
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

// Factories built, what is not persistent dropped.
Items items_of(const StateDict& state, const Dialect& dialect, const Format& format);

// Error(kInvalidArgument) with the key of a tensor without data, and of tensor_attributes for one
// that this rank does not have; what Format::check() throws.
void check_items(const Items& items, const SaveOptions& options, const Format& format);

// The ranks whose chunks this rank copies (SaveOptions::replicate), ascending; empty: it copies
// nothing. Error(kInvalidArgument) as checked_group() throws it, and without a group; kUnsupported
// where the format has no data file of a rank to copy to.
std::vector<int> replicate_group_of(const SaveOptions& options, const Format& format, int rank,
                                    int world_size);

// What SaveOptions::tp_replica_names asks for; Error(kUnsupported) where there is no such thing.
ReplicaNames replicas_to_name(const Items& items, const SaveOptions& options,
                              const Dialect& dialect, const Format& format);

// Sets PlanObject::content of the common objects, so that ranks can compare them.
void note_contents(const Items& items, const Format& format, LocalSavePlan& plan);

// Where copies are made: the contents of all objects but the dialect's own, of which files of the
// index hold copies.
void note_contents_of_copied(const Items& items, const Format& format, const Dialect& dialect,
                             LocalSavePlan& plan);
// Leaves the copies that SaveOptions::max_copy_bytes allows; what they cost.
CopyCost settle_copies(const Items& items, const Format& format, const SaveOptions& options,
                       LocalSavePlan& plan, Assignment& assignment);

}  // namespace tilestone::engine
