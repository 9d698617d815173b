// Saves without a communicator (SaveOptions::by_files) that are no checkpoint yet: what is missing,
// and how they end.
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
  int world_size = 0;             // 0: its head can't be read
  std::string format, dialect;    // "torch_dist", "pytorch"
  size_t missing_count = 0;       // ranks that have not written
  std::vector<int> missing = {};  // the lowest of them, at most 16
  std::string failure = {};       // the error that a rank has left; "": none
  bool abandoned = false;         // it will be no checkpoint; gc removes its files
  // Whether a rank of it works, as far as it was watched (FindOptions): true once something of it
  // has changed, false if nothing has for a minute; else not known.
  std::optional<bool> alive = std::nullopt;
  std::string text = {};  // what it is and what can be done about it, a sentence for people
  bool complete() const { return missing_count == 0 && !abandoned; }
};

struct FindOptions {
  double watch = 0;  // seconds, 0 or more: for how long it is looked whether ranks work
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};
// By save id. Nothing is changed. What was published or removed while it was watched is left out.
// Error(kNotFound) where there is no directory; kInvalidArgument: `watch`.
std::vector<UnpublishedSave> find_unpublished(const Location& location,
                                              const FindOptions& options = {});

struct PublishOptions {
  std::string save_id = {};  // needed where several are unpublished
  double timeout = kDefaultTimeout;
  int threads = 0;
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};
// Publishes a save of which all ranks have written, and returns its save id. The checkpoint is the
// same, byte for byte, whoever publishes it.
//
// A rank-local checkpoint (ByFiles::torch_rank_local) becomes an ordinary one: of replicas the
// lowest rank's is what `.metadata` names, data files stay as they are, and the ranks' metadata
// files go. One that stock torch has left (use_collectives=False) is read once for that, since
// nothing else says whether its replicas are the same and its files intact; there is a new save
// id. It is refused while a save is under way, with kCorrupt where ranks or elements are missing or
// damaged, kMismatch naming the key where replicas differ, and kUnsupported where an item is
// compressed. Where tensors don't lie in C order in its files, there is no manifest.
//
// Errors: kNotFound where there is none, or not this
// one; kInvalidArgument where there are several; kRankFailed naming ranks that have not written, or
// where it was abandoned; kAlreadyExists where another checkpoint stands; those of ranks that
// contradict each other (kMismatch, kCoverage).
std::string publish(const Location& location, const PublishOptions& options = {});

struct AbandonOptions {
  std::string save_id = {};
  // For how long nothing of it must change before it is taken for dead, seconds. Less than a
  // minute is safe only where its ranks are known to be dead.
  double period = 60;
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};
// Ends a save that will not be completed, having watched it for a period, so that gc can remove its
// files. A rank of it that still lives fails. Errors: kNotFound and kInvalidArgument as publish();
// kAlreadyExists where it is alive, kUnsupported where all ranks have written: it can be published.
std::string abandon(const Location& location, const AbandonOptions& options = {});

}  // namespace tilestone
