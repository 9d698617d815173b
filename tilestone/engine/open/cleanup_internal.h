// Which files of a location are left over from saves that failed or were replaced.
//
// A name alone does not make a file a leftover: it may have been copied here. A save therefore
// leaves a note before its first data file and removes it after its last leftover (see commit.cc),
// and only files of which a note speaks are removed.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/deadline.h"
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

// Whether the text is one.
bool is_save_id(std::string_view text);

inline constexpr std::string_view kManifestKind = "manifest";
inline constexpr std::string_view kDataKind = "data file";
inline constexpr std::string_view kTemporaryKind = "temporary file";
inline constexpr std::string_view kNoteKind = "note";
inline constexpr std::string_view kAttemptKind = "file of the attempt";
inline constexpr std::string_view kOutcomeKind = "outcome";  // it stays

// What a save of Tilestone makes under a name.
struct OwnName {
  std::string_view kind;  // one of the above
  std::string save_id;
};
// The same for names below kOwnDirectory, which are no format's.
std::optional<OwnName> parse_in_own_directory(std::string_view name);
// nullopt when no save makes files of this name. Nothing else is ever removed as a leftover.
std::optional<OwnName> parse_own_name(const Format& format, std::string_view name);
bool is_own_name(const Format& format, std::string_view name);

// ".tilestone/SAVE_ID.begun"
std::string note_name(std::string_view save_id);
// Leaves the note of a save that is to replace the checkpoints of the saves `replaces`; durable
// when it returns. Removed again on failure.
void leave_note(Storage& storage, const std::string& save_id, const std::set<std::string>& replaces,
                Deadline deadline);

// What the notes at a location say.
struct Notes {
  std::set<std::string> begun;  // saves that began here: they left a note or a temporary file
  std::map<std::string, std::set<std::string>> replaces;  // by the save that replaces them
  std::set<std::string> attempts;   // saves without a communicator that have left something
  std::set<std::string> abandoned;  // of those
  std::set<std::string> undecided;  // likewise: without an outcome

  // The saves whose files may go once the checkpoint of `standing` ("": none) does not name them.
  std::set<std::string> ended(const std::string& standing) const;
  // Saves without a communicator that may still become the checkpoint of the location: undecided
  // ones, and where no checkpoint `stands` those that are to be published.
  std::set<std::string> open(bool stands) const;
};
// `names`: the location's. A note that can't be read speaks of its own save only, and is logged.
Notes read_notes(Storage& storage, std::span<const std::string> names);

// Whether this is a leftover where the saves `ended` have ended. `own` is not referenced.
bool is_leftover(const OwnName& own, const std::set<std::string>& ended);
// Those of `names` that are leftovers and not referenced: what a location can do without.
std::vector<std::string> leftovers(const Format& format, std::span<const std::string> names,
                                   const std::set<std::string>& referenced,
                                   const std::set<std::string>& ended);

// A save whose files may be a checkpoint though none stands: its metadata file was lost.
struct LostCheckpoint {
  std::string save_id;
  bool began_here = false;  // a note says so: the save may also have failed just before its commit
  std::string what;         // a sentence
  std::string hint;         // how to get it back
};
// `names`: the files of a location where no checkpoint stands. Found is a save whose manifest is
// there with every data file that it names, in its size; and data files of a save of which no note
// speaks: somebody has copied them without the hidden ones.
std::optional<LostCheckpoint> find_lost(Storage& storage, const Format& format,
                                        std::span<const std::string> names, const Notes& notes);

// Removes files; a failure is reported in the log, and the others are removed all the same. False
// when one stays.
bool remove_files(Storage& storage, std::span<const std::string> names);
// The same for leftovers: notes go last, once the files of which they speak are gone for good.
void remove_leftover_files(Storage& storage, const Format& format,
                           std::span<const std::string> names);

}  // namespace tilestone::engine
