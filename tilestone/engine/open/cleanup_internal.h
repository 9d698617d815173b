// Which files of a location are left over from saves that failed or were replaced.
#pragma once

#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/format/format.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

inline constexpr std::string_view kOwnDirectory = ".tilestone";
inline constexpr std::string_view kLockName = ".tilestone/lock";
// What marks a rank-local checkpoint's metadata files as replaced: see commit.cc.
inline constexpr std::string_view kReplacedName = ".tilestone/replaced";

// The name of the temporary file through which a save publishes `what` ("manifest").
std::string temporary_name(std::string_view save_id, std::string_view what);

// A random UUID, version 4, as text.
std::string random_save_id();

// What a save of Tilestone makes under a name.
struct OwnName {
  std::string_view kind;  // "data file", "manifest", "temporary file"
  std::string save_id;
};
inline constexpr std::string_view kManifestKind = "manifest";
// The same for names below kOwnDirectory, which are no format's.
std::optional<OwnName> parse_in_own_directory(std::string_view name);
// nullopt when no save makes files of this name. Nothing else is ever removed as a leftover.
std::optional<OwnName> parse_own_name(const Format& format, std::string_view name);
bool is_own_name(const Format& format, std::string_view name);

// Those of `names` that are own names and not referenced: what a location can do without.
std::vector<std::string> leftovers(const Format& format, std::span<const std::string> names,
                                   const std::set<std::string>& referenced);

// A save whose files are no leftovers of a failed attempt, as far as can be told, though no
// checkpoint stands: its metadata file was lost.
struct LostCheckpoint {
  std::string save_id;
  std::string what;  // a sentence
  std::string hint;  // how to get it back
};
// `names`: the files of a location where no checkpoint stands. Found is a save whose manifest is
// there with every data file that it names, in its size; and data files without the lock's file,
// which every save makes before them: somebody has copied them without the hidden ones.
std::optional<LostCheckpoint> find_lost(Storage& storage, const Format& format,
                                        std::span<const std::string> names);

// Removes files; a failure is told in the log, and the others are removed all the same.
void remove_files(Storage& storage, std::span<const std::string> names);

}  // namespace tilestone::engine
