// Whether a rank-local checkpoint, of which each rank has published its own metadata, is whole.
#pragma once

#include <span>
#include <string>

#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Whether the format finds there a rank-local checkpoint and no index of another kind.
bool is_rank_local(const Format& format, std::span<const std::string> names);

// Error(kNotFound) that names the ranks whose metadata is missing, where a save without a
// communicator that began here says how many ranks there are. `names`: the location's.
void expect_all_ranks(Storage& storage, const Format& format, std::span<const std::string> names);

// What can be known of another writer's too, or of files that were copied here without the hidden
// ones: Error(kCorrupt) where a data file is of a rank without metadata. Error(kNotFound) where the
// save was abandoned. `metadata`: of one rank or of all.
void expect_no_other_ranks(Storage& storage, const Format& format,
                           std::span<const std::string> names, const Metadata& metadata);

}  // namespace tilestone::engine
