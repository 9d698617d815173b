// What a directory holds: which names belong to a checkpoint, and its format and dialect.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/foreign.h"
#include "tilestone/format/format.h"
#include "tilestone/format/known/known.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

inline constexpr uint64_t kAnySize = UINT64_MAX;  // of a file that is known to exist
inline constexpr int kMaxOverwrites = 8;  // overwrites tolerated while one checkpoint is described

// What stands at a location, by one look, from which a save decides all that it has to.
struct Standing {
  std::vector<std::string> names;  // of all files but `remains`, sorted
  // Files that a killed save has put under names that each checkpoint of its dialect uses, without
  // the last of them, the switch.
  Remains remains;
  std::vector<std::string> of_checkpoint;  // see names_of_checkpoint()
  // Of the checkpoint; null: there is none of a known format, nor of the one that was asked for.
  DetectedFormat found;
  std::optional<ForeignCheckpoint> foreign;
  bool is_removed = false;  // a checkpoint is being removed here (kRemovedName)
  Notes notes;
};
// All names at a place, sorted, and the switch of a checkpoint also if the listing lags and lacks
// it.
std::vector<std::string> names_at(Storage& storage);

// Lists the whole tree. `wanted` overrides the format if its files are there. Error(kNotFound) if a
// file is lost meanwhile.
Standing look_at(Storage& storage, const std::shared_ptr<const Format>& wanted);

// Whether there is a checkpoint of any known format or of `also`.
bool any_checkpoint(Storage& storage, const Format& also);

// Whether a save with a communicator is known to be under way.
bool is_saved_to(Storage& storage);

// A save without a communicator, in a dialect whose files have fixed names, publishes its index
// file by file (commit/attempt_publish.cc). The first file names the save. Returns the save id
// of an index whose switch is not published yet. Its files do not make a checkpoint.
std::optional<std::string> partly_published_by(Storage& storage);

// The names that identify the checkpoint, sorted, without the files of an unfinished index (see
// partly_published_by). Subdirectories are listed only if there is a metadata.json.
// `at_once`: the names of all files, if one request has just listed them (Depth::kAtOnce).
std::vector<std::string> names_of_checkpoint(Storage& storage,
                                             std::vector<std::string> at_once = {});

// The format and dialect that these names and marks show, among the formats that saves write; null
// if there are none.
DetectedFormat detect(Storage& storage, std::span<const std::string> names);

// The same, with `wanted` for the format if its files are there.
DetectedFormat detect_as(Storage& storage, const std::shared_ptr<const Format>& wanted,
                         std::span<const std::string> names);

// The format and dialect of the checkpoint, among the readable formats. `wanted` overrides the
// detected format.
// Error(kNotFound) if there is no checkpoint, with a hint at what may be left of one.
DetectedFormat find_format(Storage& storage, const std::shared_ptr<const Format>& wanted,
                           std::span<const std::string> names);

// Reads the files that the format and the dialect need, among these names, but for those that were
// read already.
DirectoryFiles read_index(Storage& storage, const Format& format, const Dialect* dialect,
                          std::span<const std::string> names, const FilesRead& read = {});

// `names` without those of `others`.
std::vector<std::string> without(std::vector<std::string> names,
                                 const std::vector<std::string>& others);

}  // namespace tilestone::engine
