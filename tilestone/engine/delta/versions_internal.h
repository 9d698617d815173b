// The versions of a directory of deltas: version-00000012, each a delta or a whole checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/engine/delta/delta_file_internal.h"
#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

struct DeltaVersion {
  uint64_t number = 0;
  bool whole = false;  // a checkpoint
};

// Whether a version is a checkpoint and no delta; nullopt: no complete version is there.
std::optional<bool> is_whole(Storage& version);
// Throws Error(kInvalidArgument) if a delta is there, which is not the base of another one.
void expect_no_delta(const Location& base);
std::string version_name(uint64_t number);
// Those that are complete, by number. Nothing if there is no directory.
std::vector<DeltaVersion> versions_at(const Location& location);
// Error(kMismatch) if this is the folder version-N of such a directory, and the version before it
// is there and has another id, or none.
void expect_version_before(Storage& folder, const std::string& id);
// The attribute of a whole version that has its id.
inline constexpr std::string_view kVersionId = "tilestone_delta_result";
// For a message: "version-00000010 (whole), version-00000011", without a gap up to the folder of a
// delta; "" if it is in no such directory or has no such chain.
std::string chain_text(Storage& delta);

}  // namespace tilestone::engine
