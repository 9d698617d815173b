// Removal of files that failed or interrupted saves have left at a location. The next save to the
// location removes them too; these functions are for a location to which nobody will save again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/engine/run/location.h"

namespace tilestone {

// A file that no checkpoint at its location needs.
struct Leftover {
  std::string name;   // in the location; "../NAME" is a directory beside it
  uint64_t size = 0;  // bytes; for a directory, the sum over its files
  std::string what;   // "data file of the save 0123...", ...
  std::string why;    // why it is not needed, as a clause: "it was not published"
};

// Finds the files that can be removed, sorted by name:
// - files with a save id in their name, if a note in .tilestone says that a save has made or
//   replaced them there, and no existing checkpoint names them;
// - metadata of a rank-local checkpoint whose replacement was interrupted after its commit;
// - directories that dead saves have left beside the location, under names that contain the
//   location's name and the save id.
//
// Changes nothing and takes no lock. A save that begins meanwhile is not disturbed, and read access
// to the location is enough.
//
// `force`: also finds files that no note mentions. Without
// `force` these stay, because they may have been copied there, and a warning is logged.
//
// Errors: kNotFound when there is no file at all; kAlreadyExists while a save is under way there;
// kCorrupt without `force`, when no checkpoint exists and the files may be all that is left of one
// (files that no note mentions, or a manifest with all its data files); kCorrupt and kUnsafe when
// the checkpoint can't be read, because then the files that it needs are not known; kIo.
std::vector<Leftover> find_leftovers(const Location& location, bool force = false);

// Removes the files that find_leftovers finds, and returns them. Holds the location's lock, so that
// no save can begin meanwhile. After a crash at any moment the checkpoint is unchanged, and some
// leftovers remain.
//
// Errors: those of find_leftovers; kIo with the name of a file that can't be removed, thrown once
// the other files are removed; kUnsupported where the storage has no locks.
std::vector<Leftover> remove_leftovers(const Location& location, bool force = false);

}  // namespace tilestone
