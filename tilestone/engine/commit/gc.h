// Files that failed or interrupted saves have left at a location. The next save there removes them
// too; this is for a location that nobody will save to again.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/engine/run/location.h"
#include "tilestone/format/format.h"

namespace tilestone {

// A file that no checkpoint at its location needs.
struct Leftover {
  std::string name;   // in the location; "../NAME": a directory beside it
  uint64_t size = 0;  // bytes, of a directory's files
  std::string what;   // "data file of the save 0123...", ...
  std::string why;    // why it is not needed, as a sentence's end
};

// What can go: files with a save's id in their name that a note in .tilestone says a save has made
// or replaced there, and that no standing checkpoint names; and metadata of a rank-local checkpoint
// whose replacement was interrupted after its commit. Directories that dead saves have left beside
// the location, under names that hold its own and the save's id. Sorted by name. Changes nothing.
//
// Looking takes no lock and makes nothing: a save that begins meanwhile goes on, and a location
// that can only be read will do.
//
// `format`: default torch_dist. `force`: also files of which no note speaks. They may have been
// copied there, and stay otherwise, as the log says; where no checkpoint stands, they or a manifest
// with all its data files may be all that is left of one: kCorrupt. Other errors: kNotFound when
// there is no file at all, kAlreadyExists while a save is under way there; kCorrupt and kUnsafe
// when the checkpoint can't be read, since what it needs is then not known; kIo.
std::vector<Leftover> find_leftovers(const Location& location,
                                     const std::shared_ptr<const Format>& format = nullptr,
                                     bool force = false);

// Removes what find_leftovers finds, while no save can begin there, and returns it. A file that
// can't be removed is kIo with its name, thrown once the others are gone. A crash at any moment
// leaves the checkpoint as it is, and some leftovers. kUnsupported where the storage has no locks.
std::vector<Leftover> remove_leftovers(const Location& location,
                                       const std::shared_ptr<const Format>& format = nullptr,
                                       bool force = false);

}  // namespace tilestone
