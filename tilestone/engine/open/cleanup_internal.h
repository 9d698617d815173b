// Finds the files of a location that are left over from saves that failed or were replaced.
//
// A name alone does not make a file a leftover, because the file may have been copied here.
// Therefore a save leaves a note before its first data file, and removes it after its last leftover
// (see transaction.cc). Only files that a note covers are removed.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

inline constexpr std::string_view kTilestoneDirectory = ".tilestone";
inline constexpr std::string_view kLockName = ".tilestone/lock";
inline constexpr std::string_view kLockFile = "lock";  // the same in kTilestoneDirectory
// The file that marks a rank-local checkpoint's metadata files as replaced: see
// commit/old_checkpoint.cc.
inline constexpr std::string_view kReplacedName = ".tilestone/replaced";
// Exists while the checkpoint is removed as a whole: whatever else is still here, there is none any
// more. See commit/whole_removal.cc.
inline constexpr std::string_view kRemovedName = ".tilestone/removed";
inline constexpr const char* kRemovedHint =
    "it was removed, and some of its files are left: `tilestone gc` removes them";

bool in_tilestone_directory(std::string_view name);

// The name of the temporary file through which a save publishes `what` ("manifest").
std::string temporary_name(std::string_view save_id, std::string_view what);
// For a file of the save's index: "metadata" for ".metadata", "zarray" for "a/b/.zarray". Different
// files may share a name.
std::string temporary_of(std::string_view save_id, std::string_view file);

// Whether the text has the form of a save id: a UUID in lower case.
bool is_save_id(std::string_view text);

inline constexpr std::string_view kManifestKind = "manifest";
inline constexpr std::string_view kDataKind = "data file";
inline constexpr std::string_view kTemporaryKind = "temporary file";
inline constexpr std::string_view kNoteKind = "note";
inline constexpr std::string_view kAttemptKind = "file of the attempt";
inline constexpr std::string_view kReceiptKind = "receipt";  // or the outcome for the receipts
inline constexpr std::string_view kOutcomeKind = "outcome";  // never removed

// The meaning of a file name that saves of Tilestone use.
struct TilestoneName {
  std::string_view kind;  // one of the above
  std::string save_id;
  // What a note must name to cover the file: the save id, and before it what stands before it in a
  // data file's name (SaveOptions::separation_hint). A user's copy may have such a name, too.
  std::string noted;
};
// Parses names below kTilestoneDirectory, which do not depend on the format.
std::optional<TilestoneName> parse_in_tilestone_directory(std::string_view name);
// Also knows the names of data files. nullopt if no save makes files of this
// name. Such files are never removed as leftovers.
std::optional<TilestoneName> parse_tilestone_name(std::string_view name);
bool is_own_name(std::string_view name);
std::string_view kind_of(std::string_view name);  // TilestoneName::kind; "": nullopt

// ".tilestone/SAVE_ID.begun"
std::string note_name(std::string_view save_id);
// Leaves the note of a save. `names` (TilestoneName::noted): those of the saves whose checkpoints
// it will replace, and its own, if its files have other names than its id. The note is durable when
// the call returns, if kTilestoneDirectory is. A note of no names is an empty file. On failure it
// is removed again.
void leave_note(Storage& storage, const std::string& save_id, const std::set<std::string>& names,
                Deadline deadline);

// Notes the names of data files that the save `save_id` will write under names without its id.
// After leave_note(), before the first of them.
void leave_fixed_names(Storage& storage, const std::string& save_id,
                       const std::set<std::string>& names, Deadline deadline);
std::string fixed_names_of(std::string_view save_id);  // the file that says them

// The contents of the notes at a location.
struct Notes {
  // Saves that began here: they left a note or a temporary file. Here and in `replaces`, further
  // elements are TilestoneName::noted of their files.
  std::set<std::string> begun;
  std::map<std::string, std::set<std::string>> replaces;  // replacing save -> replaced saves
  // Files that saves which began here may have written (leave_fixed_names()); none where the switch
  // of such a checkpoint stands.
  std::set<std::string> fixed_names;
  std::set<std::string> unread;     // notes, by name, that could not be read now; they must stay
  std::set<std::string> attempts;   // saves without a communicator that left more than an outcome
  std::set<std::string> abandoned;  // those of `attempts` with the outcome "abandoned"
  std::set<std::string> undecided;  // those of `attempts` without an outcome

  // What the note of a save says: `names` as for leave_note().
  void add(const std::string& save_id, const std::set<std::string>& names);
  // The saves whose files may be removed unless the existing checkpoint names them. `existing`: the
  // save id of that checkpoint, "" if there is none or another writer made it. A rank-local one
  // does not end its save, which may yet become an ordinary one.
  std::set<std::string> ended(const std::string& existing, bool is_rank_local = false) const;
  // Saves without a communicator that may still become the checkpoint of the location: those
  // without an outcome and, if no checkpoint exists there (`has_checkpoint` is false), all that are
  // not abandoned.
  std::set<std::string> open(bool has_checkpoint) const;
};
// `names`: all names at the location. A note that can't be read is logged, and covers only its own
// save.
Notes read_notes(Storage& storage, std::span<const std::string> names);

// The saves that have a manifest here, or an attempt. Further elements are TilestoneName::noted of
// the data files in the manifests that can be read.
std::set<std::string> recorded_saves(Storage& storage, std::span<const std::string> names);

// Whether a file is a leftover. `ended`: Notes::ended(). The existing checkpoint must not name it.
bool is_leftover(const TilestoneName& own, const std::set<std::string>& ended);
// Those of `names` that are leftovers and not among `referenced`. `ended`: as above.
std::vector<std::string> leftovers(std::span<const std::string> names,
                                   const std::set<std::string>& referenced, const Notes& notes,
                                   const std::set<std::string>& ended);

// Of all files `names`: those with fixed names that saves which began here have put, and that their
// manifests describe while their switch is still a temporary file, with their tags; and those of
// Notes::fixed_names, with "", as where there are no tags.
using Remains = std::map<std::string, std::string>;
Remains remains_of_index(Storage& storage, std::span<const std::string> names, const Notes& notes);
// For who holds the claim. Removes those that still have their tags, so that no file of a later
// save goes.
void remove_remains(Storage& storage, const Remains& remains);

// A save whose files may be those of a checkpoint that has lost its metadata file.
struct LostCheckpoint {
  std::string save_id;
  bool began_here = false;  // according to a note; it may also have failed just before its commit
  std::string what;         // what was found, a sentence
  std::string hint;         // how to get the checkpoint back
};
// `names`: the files of a location without a checkpoint. Finds a save whose manifest exists with
// every data file that it names, in the right size, unless its index is still a temporary file:
// then it was ended before it was published. Also finds data files that no note covers, which were
// probably copied without the hidden files.
std::optional<LostCheckpoint> find_lost(Storage& storage, std::span<const std::string> names,
                                        const Notes& notes);

// Removes files. A failure is logged, and the other files are still removed. Returns false if a
// file stays.
bool remove_files(Storage& storage, std::span<const std::string> names);
// The same for leftovers. Removes notes last, once the files that they cover are durably removed.
void remove_leftover_files(Storage& storage, std::span<const std::string> names);

}  // namespace tilestone::engine
