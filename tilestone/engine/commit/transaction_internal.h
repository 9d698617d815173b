// One save at one location: begin it, write, commit or abandon. transaction.cc describes the
// protocol. A transaction knows no ranks and calls nobody back: whoever drives a save lets ranks
// write their items (write/writer_internal.h) at storage() and hands their receipts to prepare().
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/format/foreign.h"
#include "tilestone/format/format.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Call begin, prepare, commit and clean in this order. One thread at a time, not always the same
// one. Holds the location's lock from begin() until it is destroyed. A transaction that is
// destroyed without commit() or abandon() leaves what a process leaves that dies at that point.
class Transaction {
 public:
  // save_id: a new random id (random_save_id). separation_hint: SaveOptions::separation_hint.
  Transaction(std::shared_ptr<Storage> storage, std::shared_ptr<const Format> format,
              std::shared_ptr<const Dialect> dialect, std::string save_id, bool overwrite,
              const std::string& separation_hint = {});

  // Step 1. Error(kAlreadyExists) where a checkpoint exists and `overwrite` is false, or where
  // another save is under way; kUnsupported where the existing checkpoint can't be replaced in one
  // step (format/foreign.h), or where a staged save is needed and not possible.
  void begin(Deadline deadline);
  // Where ranks write, once the save has begun: the location, or the directory of a staged save.
  const std::shared_ptr<Storage>& storage() const { return storage_; }
  // The name of a staged save's directory, by which ranks of other processes find it
  // (staging_storage()), once the save has begun. "": the save is not staged.
  std::string staging() const { return staging_ ? staging_->name() : std::string(); }

  // The input of step 3.
  struct ToPublish {
    SaveToIndex save;      // the save id and the writer are set by prepare()
    int threads = 0;       // the save's option
    bool manifest = true;  // false: no manifest can describe the receipts, and none is published
    std::shared_ptr<RunStep> step = nullptr;  // SaveOptions::step
  };
  // Step 3. Checks the receipts, and that every file that they name exists here. Makes everything
  // durable except the switch of the index and the files that are published after it. Before that,
  // compares what is saved with the run's step before (compare_with_before()). Also throws
  // the errors of begin(), if a checkpoint or a save without a communicator has appeared at the
  // location meanwhile.
  void prepare(ToPublish given, Deadline deadline);
  // Step 4. The checkpoint begins to exist during this call.
  void commit(Deadline deadline);
  // commit() was called: the checkpoint may exist, and nobody may remove anything.
  bool was_tried() const { return was_tried_; }
  // Step 5. Failures are logged.
  void clean();
  // To be called instead of commit(). Removes what prepare() made. If no rank writes data files any
  // more, which `none_writes` says, or because begin() failed, also removes the save's note and the
  // directories that the save made, where nothing else is in them. It waits a second for other
  // ranks, which remove their data files. Failures are logged.
  void abandon(bool none_writes);

 private:
  void begin_in_place(Deadline deadline);
  void begin_staged();
  bool needs_staging() const;
  std::optional<ForeignCheckpoint> foreign() const;
  void refuse_existing() const;
  void refuse_directory_of_index() const;
  void refuse_what_exists() const;
  std::set<std::string> open_attempts(const Notes& notes) const;
  void refuse_open_attempts() const;
  void refuse_other_files() const;
  void make_and_lock(const Deadline& deadline);
  bool lock();
  void finish_replacement();
  void inspect_existing();
  void remove_leftovers(const std::set<std::string>& referenced, const std::string& existing);
  void mark_replaced(Deadline deadline);
  void remove_rank_local();
  void withdraw_switch(const IndexFile& file);
  void remove_directories_of_replaced();
  void publish_before(int threads, Deadline deadline);
  void publish(IndexRole role, Deadline deadline);
  std::string temporary_of(const IndexFile& file) const;
  void publish_switch(Deadline deadline);
  bool remove_note();

  std::shared_ptr<Storage> location_;
  std::shared_ptr<Storage> storage_;  // see storage()
  std::shared_ptr<const Format> format_;
  std::shared_ptr<const Dialect> dialect_;
  std::string save_id_;
  bool overwrite_;
  std::unique_ptr<StorageLock> lock_;
  std::optional<Staging> staging_;  // of a staged save

  std::set<std::string> old_files_;       // of the existing checkpoint: data files and manifest
  std::set<std::string> old_rank_local_;  // its metadata files, if it is a rank-local checkpoint
  std::set<std::string> noted_;           // of the saves that wrote these files, and this one
  std::set<std::string> new_files_;
  Index index_;
  std::shared_ptr<RunStep> step_;       // ToPublish::step
  Inventory inventory_;                 // for it, of this save
  std::vector<std::string> published_;  // files of the index that this save has published
  bool was_tried_ = false;
  bool has_note_ = false;   // the note that this save has begun was left
  MadeDirectories made_;    // the location's and those above it
  bool makes_own_ = false;  // kTilestoneDirectory was absent before
};

}  // namespace tilestone::engine
