// Checks whether a rank-local checkpoint, for which each rank has published its own metadata, is
// complete.
#pragma once

#include <span>
#include <string>

#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Whether the format finds a rank-local checkpoint among the names, and no index of another kind.
bool is_rank_local(const Format& format, std::span<const std::string> names);

// Error(kNotFound) that names the ranks whose metadata is missing. Does nothing unless a save
// without a communicator began here, because only its head gives the number of ranks. `names`: all
// names at the location.
void expect_all_ranks(Storage& storage, const Format& format, std::span<const std::string> names);

// Checks that also work for another writer's checkpoint, or one that was copied here without its
// hidden files. Error(kCorrupt) if a rank has a data file but no metadata; Error(kNotFound) if the
// save was abandoned. `metadata`: of one rank or of all.
void expect_no_other_ranks(Storage& storage, const Format& format,
                           std::span<const std::string> names, const Metadata& metadata);

}  // namespace tilestone::engine
