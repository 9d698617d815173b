// Saves without a communicator (SaveOptions::by_files) that are not yet a checkpoint: which ranks
// are missing, and how to publish or abandon such a save.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/engine/run/options.h"

namespace tilestone {

struct UnpublishedSave {
  std::string save_id;
  int world_size = 0;             // 0 if its head can't be read
  std::string format, dialect;    // that were passed to the save
  size_t missing_count = 0;       // how many ranks have not written
  std::vector<int> missing = {};  // the lowest of them, at most 16
  std::string failure = {};       // the error with which it has failed; "" if it has not
  // Abandoned or failed: it can't become a checkpoint any more; gc removes its files.
  bool abandoned = false;
  // Whether one of its ranks is working, as seen while it was watched (FindOptions::watch): true if
  // one holds its claim or a file changed, false if not for at least a minute, nullopt if not
  // known.
  std::optional<bool> alive = std::nullopt;
  std::string text = {};  // its state and what can be done about it, a sentence for users
  bool complete() const { return missing_count == 0 && !abandoned; }
};

struct FindOptions {
  double watch = 0;  // seconds, at least 0: how long to watch whether ranks are working
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};
// The unpublished saves, sorted by save id; none if there is no directory. Changes nothing. Leaves
// out saves that were published or removed while they were watched. Error(kInvalidArgument) for a
// `watch` that is negative or NaN.
std::vector<UnpublishedSave> find_unpublished(const Location& location,
                                              const FindOptions& options = {});

struct PublishOptions {
  std::string save_id = {};  // required if several saves are unpublished
  double timeout = kDefaultTimeout;
  int threads = 0;
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};
// Publishes a save that all ranks have written, and returns its save id. The checkpoint is the
// same, byte for byte, whichever process publishes it.
//
// A rank-local checkpoint (ByFiles::torch_rank_local) becomes an ordinary one with a new save id.
// `.metadata` names the lowest rank's replicas, the data files stay as they are, and the ranks'
// metadata files are removed. The items of one of stock torch (use_collectives=False) are read
// once, to check that its replicas are equal and its files are intact. That is refused while a save
// is under way, with kCorrupt where ranks or elements are missing or damaged, with kMismatch naming
// the key where replicas differ, and with kUnsupported where an item is compressed. If tensors are
// not in C order in its files, no manifest is written.
//
// Errors: kNotFound where there is no unpublished save, or none with this id; kInvalidArgument
// where there are several and no id is given; kRankFailed where ranks have not written (it names
// them) or the save was abandoned; kAlreadyExists where another checkpoint exists; kTimeout;
// kMismatch and kCoverage where ranks' receipts contradict each other, or a data file is missing.
// With such an error, but kRankFailed and kTimeout, a save that is not rank-local has failed: gc
// removes its files.
std::string publish(const Location& location, const PublishOptions& options = {});

struct AbandonOptions {
  std::string save_id = {};
  // Seconds for which none of its files may change before the save is considered dead. Less than a
  // minute is safe only if its ranks are known to be dead.
  double period = 60;
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};
// Ends a save that will not be completed, so that gc can remove its files. Watches it for `period`
// first. A rank that is still alive then fails. Returns the save id. Errors: kNotFound and
// kInvalidArgument as for publish(); kAlreadyExists where the save is alive; kUnsupported where all
// ranks have written.
std::string abandon(const Location& location, const AbandonOptions& options = {});

// Removal of files that failed or interrupted saves have left at a location. The next save to the
// location removes them too; these functions are for a location to which nobody will save again.

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
// Errors: kNotFound when there is no file at all, and, with a hint at what is there, when neither a
// checkpoint nor anything of a save is; kAlreadyExists while a save is under way there;
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
