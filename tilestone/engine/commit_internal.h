// The commit of a save, as the coordinator makes it. The protocol stands in commit.cc.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/cleanup_internal.h"
#include "tilestone/engine/opening_internal.h"
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
         std::string save_id, bool overwrite);

  // Step 1. Error(kAlreadyExists) when a checkpoint stands there and overwriting was not asked
  // for, or another save is under way; kUnsupported for overwriting one of another kind, which
  // can't be replaced in one step (format/foreign.h).
  void begin();

  // Step 3: checks the reports, and that every file they name is here; makes everything durable but
  // the metadata file. Both are by rank; encoded[i] is what reports[i].encode() gives. `threads`:
  // the save's option.
  void prepare(std::vector<RankReport> reports, std::span<const Bytes> encoded, int threads,
               Deadline deadline);
  // Step 4. The checkpoint exists from within this call on.
  void publish(Deadline deadline);
  // Step 5. Failures are told in the log.
  void clean();
  // Instead of publish(): removes what prepare() made. Failures are told in the log.
  void abandon();

 private:
  void refuse_foreign() const;
  void refuse_existing() const;
  void lock();
  void finish_replacement();
  void look_at_old();
  void remove_leftovers(const std::set<std::string>& referenced);
  void mark_replaced(Deadline deadline);
  void remove_rank_local();

  std::shared_ptr<Storage> storage_;
  std::shared_ptr<const Format> format_;
  const std::string save_id_;
  const bool overwrite_;
  std::unique_ptr<StorageLock> lock_;

  std::set<std::string> old_files_;       // of the checkpoint that stands there: data, manifest
  std::set<std::string> old_rank_local_;  // its metadata files, when it is a rank-local one
  std::set<std::string> new_files_;
  std::optional<LostCheckpoint> lost_;  // where none stands
  Bytes metadata_;
};

}  // namespace tilestone::engine
