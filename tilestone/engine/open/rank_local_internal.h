// A rank-local checkpoint: each rank has published its own metadata. Checks whether it is complete,
// and makes what the metadata of the ranks lacks from their receipts.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "tilestone/base/bytes.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/format/index.h"
#include "tilestone/plan/receipt.h"
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
// hidden files. `metadata`: of one rank or of all.
// Error(kCorrupt) if metadata names another save than its files do; Error(kNotFound) if the save
// was abandoned.
void expect_own_files(Storage& storage, const Format& format, std::span<const std::string> names,
                      const Metadata& metadata);
// Error(kCorrupt) if a rank has a data file but no metadata.
void expect_no_other_ranks(const Format& format, std::span<const std::string> names,
                           const Metadata& metadata);

// The metadata file of one rank, as in torch's rank-local mode. Does not check coverage.
// Error(kUnsupported) for a format that has no such file.
IndexFile describe_rank(Receipt receipt, const Format& format);

// What the receipts of a rank-local save of ours say beyond the ranks' metadata (checksums above
// all), as an encoded manifest whose sums of the index are those of the ranks' metadata files. An
// object that several ranks have is in the lowest rank's receipt, and a copy in the others. `rank`:
// only this rank's receipt has content. Returns nothing if the receipts are not at the location:
// another program made the save, or it was copied without its hidden files.
Bytes manifest_of_receipts(Storage& storage, const Format& format, const Dialect& dialect,
                           const std::string& save_id, std::optional<int> rank = std::nullopt);

}  // namespace tilestone::engine
