// The commit of a save, as the coordinator makes it. The protocol stands in commit.cc.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/format/foreign.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/report.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// begin, prepare, publish, clean: in this order, by one thread. Holds the location's lock from
// begin() until it goes.
class Commit {
 public:
  // save_id: a new random one.
  Commit(std::shared_ptr<Storage> storage, std::shared_ptr<const Format> format,
         std::shared_ptr<const Dialect> dialect, std::string save_id, bool overwrite);

  // Step 1. Error(kAlreadyExists) when a checkpoint stands there and overwriting was not asked
  // for, or another save is under way; kUnsupported for overwriting one that can't be replaced in
  // one step (format/foreign.h), and where a staged save is not possible.
  void begin(Deadline deadline);
  // Of a staged save, once it has begun: its directory's name, for staging_storage(). "" otherwise.
  std::string staging() const { return staging_ ? staging_->name() : std::string(); }

  // What step 3 works on.
  struct Reported {
    std::vector<RankReport> reports;  // by rank
    std::span<const Bytes> encoded;   // encoded[i] is what reports[i].encode() gives
    int threads = 0;                  // the save's option
    const Items* items = nullptr;     // the coordinator's
    std::map<std::string, std::string> attributes = {};  // likewise
    CopyPolicy copies = CopyPolicy::kRefuse;
    std::set<std::string> remains = {};  // Manifest::remains
    bool manifest = true;  // false: the reports say what no manifest can, and none is published
    ReplicaNames replicas = {};  // SaveOptions::tp_replica_names
  };
  // Step 3: checks the reports, and that every file they name is here; makes everything durable but
  // the switch of the index and what is published after it. Errors of begin() where a checkpoint or
  // a save without a communicator has come to the location meanwhile.
  void prepare(Reported reported, Deadline deadline);
  // Step 4. The checkpoint exists from within this call on.
  void publish(Deadline deadline);
  // Step 5. Failures are reported in the log.
  void clean();
  // Instead of publish(): removes what prepare() made, and the save's note where `alone`: no other
  // rank can have data files yet. Failures are reported in the log.
  void abandon(bool alone);

 private:
  void begin_in_place(Deadline deadline);
  void begin_staged();
  bool needs_staging() const;
  std::optional<ForeignCheckpoint> foreign() const;
  void refuse_existing() const;
  bool has_whole_checkpoint() const;
  void refuse_open_attempts() const;
  void lock();
  void finish_replacement();
  void look_at_old();
  void remove_leftovers(const std::set<std::string>& referenced, const std::string& standing);
  void mark_replaced(Deadline deadline);
  void remove_rank_local();
  void publish_before(int threads, Deadline deadline);
  void publish(IndexRole role, Deadline deadline);

  std::shared_ptr<Storage> location_;
  std::shared_ptr<Storage> storage_;  // what the save writes in
  std::shared_ptr<const Format> format_;
  std::shared_ptr<const Dialect> dialect_;
  const std::string save_id_;
  const bool overwrite_;
  std::unique_ptr<StorageLock> lock_;
  std::optional<Staging> staging_;  // then storage_ is its directory beside location_

  std::set<std::string> old_files_;       // of the checkpoint that stands there: data, manifest
  std::set<std::string> old_rank_local_;  // its metadata files, when it is a rank-local one
  std::set<std::string> replaces_;        // the saves whose files they are
  std::set<std::string> new_files_;
  Index index_;
  std::vector<std::string> published_;  // files of the index that stand before the switch
  bool has_note_ = false;               // that this save has begun
};

}  // namespace tilestone::engine
