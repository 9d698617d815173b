// Saves without a communicator (SaveOptions::by_files) that are not yet a checkpoint: which ranks
// are missing, and how to publish or abandon such a save.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"

namespace tilestone {

struct UnpublishedSave {
  std::string save_id;
  int world_size = 0;             // 0 if its head can't be read
  std::string format, dialect;    // "torch_dist", "pytorch"
  size_t missing_count = 0;       // ranks that have not reported
  std::vector<int> missing = {};  // the lowest of them, at most 16
  // The error that a rank has left, or that of reports that contradict each other; "" if none.
  std::string failure = {};
  bool abandoned = false;  // it can't become a checkpoint any more; gc removes its files
  // Whether one of its ranks is working, as seen while it was watched (FindOptions::watch): true if
  // one of its files changed, false if none changed for at least a minute, nullopt if not known.
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
// A rank-local checkpoint (ByFiles::torch_rank_local) becomes an ordinary one. `.metadata` names
// the lowest rank's replicas, the data files stay as they are, and the ranks' metadata files are
// removed. A rank-local checkpoint of stock torch (use_collectives=False) gets a new save id, and
// its items are read once, to check that its replicas are equal and its files are intact. That is
// refused while a save is under way, with kCorrupt where ranks or elements are missing or damaged,
// with kMismatch naming the key where replicas differ, and with kUnsupported where an item is
// compressed. If tensors are not in C order in its files, no manifest is written.
//
// Errors: kNotFound where there is no unpublished save, or none with this id; kInvalidArgument
// where there are several and no id is given; kRankFailed where ranks have not written (it names
// them) or the save was abandoned; kAlreadyExists where another checkpoint exists; kTimeout;
// kMismatch and kCoverage where ranks' reports contradict each other, or a data file is missing.
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
// ranks have written and the save can be published.
std::string abandon(const Location& location, const AbandonOptions& options = {});

}  // namespace tilestone
