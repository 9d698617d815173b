// One save at one location: begin it, write, commit or abandon. transaction.cc describes the
// protocol. A transaction knows no ranks and calls nobody back: whoever drives a save lets ranks
// write their items (write/writer_internal.h) at storage() and hands their receipts to prepare().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/commit/claim_internal.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/engine/commit/old_checkpoint_internal.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Call begin, prepare, commit and clean in this order. One thread at a time, not always the same
// one. Holds the location's lock from begin() until it is destroyed. A transaction that is
// destroyed without commit() or abandon() leaves what a process leaves that dies at that point.
class Transaction {
 public:
  // save_id: a new random id (random_uuid). separation_hint: SaveOptions::separation_hint.
  // one_writer: RequestView::one_writer.
  Transaction(std::shared_ptr<Storage> storage, std::shared_ptr<const Format> format,
              std::shared_ptr<const Dialect> dialect, std::string save_id, bool overwrite,
              const std::string& separation_hint = {}, bool one_writer = false);

  // Steps 1 to 3. Error(kAlreadyExists) where a checkpoint exists and `overwrite` is false, or
  // where another save is under way; kUnsupported where the existing checkpoint can't be replaced
  // in one step (format/foreign.h), or where a save in a sibling is needed and not possible.
  void begin(Deadline deadline);
  // Where ranks write, once the save has begun: the location, or the sibling of a save.
  const std::shared_ptr<Storage>& storage() const { return storage_; }
  // The name of the sibling, by which ranks of other processes find it
  // (sibling_storage()), once the save has begun. "": the save writes at the location.
  std::string sibling() const { return sibling_ ? sibling_->name() : std::string(); }

  // Between steps 3 and 4: the names of the data files, if they have no save id in them and the
  // save writes at the location. Error(kUnsupported) where that needs a claim and nothing can be
  // claimed.
  void note_files(const std::set<std::string>& names, Deadline deadline);
  // After a failure, before abandon(): removes files that this save has made. Not those with fixed
  // names that may be another save's by now, because the claim was lost.
  void discard(std::span<const std::string> files);
  // False: the place can't be claimed, or the claim was lost.
  bool holds_claim() const { return claim_.is_held(); }

  // The input of step 5.
  struct ToPublish {
    SaveToIndex save;      // the save id and the writer are set by prepare()
    int threads = 0;       // the save's option
    bool manifest = true;  // false: no manifest can describe the receipts, and none is published
    std::shared_ptr<RunStep> step = nullptr;  // SaveOptions::step
  };
  // Step 5. Checks the receipts, and that every file that they name exists here. Makes everything
  // durable except the switch of the index and the files that are published after it. Before that,
  // compares what is saved with the run's step before (compare_with_before()). Where the location
  // is not locked, also throws the errors of begin(), if a checkpoint or a save without a
  // communicator has appeared there meanwhile.
  void prepare(ToPublish given, Deadline deadline);
  // The same for an index that was made before, of this save id: of a step that was saved to a fast
  // tier, or of what remains of a checkpoint. `dialects`: which of its files are the dialect's;
  // `receipts`: of which only the files count. Without a manifest none is published.
  void prepare_made(NewIndex made, const std::set<std::string>& dialects,
                    std::span<const Receipt> receipts, int threads, Deadline deadline);
  // Step 6. The checkpoint begins to exist during this call. If the call fails and was_tried(), it
  // is not known whether the checkpoint exists.
  void commit(Deadline deadline);
  // Publishing was tried, and not refused: the checkpoint may exist, and nobody may remove
  // anything.
  bool was_tried() const { return stage_ == Stage::kTried; }
  // Step 7. Failures are logged.
  void clean();
  // To be called instead of commit(). Removes what prepare() made. If no rank writes data files any
  // more, which `none_writes` says, or because begin() failed, also removes the save's note and the
  // directories that the save made, where nothing else is in them. It waits a second for other
  // ranks, which remove their data files. Failures are logged.
  void abandon(bool none_writes);

 private:
  enum class Stage : uint8_t { kNew, kBegun, kTried };  // kBegun: the save's note was left

  Standing look(const std::function<void()>& end_removal = nullptr) const;
  void begin_in_place(bool is_fresh, Deadline deadline);
  void begin_in_sibling(const Standing& before);
  void expect_own_files();
  void prepare_index(bool manifest, int threads, Deadline deadline);
  void publish_before(int threads, Deadline deadline);
  void publish(IndexRole role, Deadline deadline);
  void put_switch(Deadline deadline);
  bool put_switch_again(int tries, Deadline deadline);
  void clean_in_place();
  std::vector<IndexFile> files_that_follow() const;
  std::string temporary_of(const IndexFile& file) const;
  bool published_is_ours() const;
  bool remove_note();

  SaveTerms terms_;
  std::shared_ptr<Storage> location_;
  std::shared_ptr<Storage> storage_;   // see storage()
  Claim claim_;                        // of the location
  std::optional<NewSibling> sibling_;  // of a save in a sibling, which has a claim of its own
  OldCheckpoint old_;
  NewIndex new_;
  std::vector<std::string> published_;  // files of the index that this save has published
  std::shared_ptr<RunStep> step_;       // ToPublish::step
  Stage stage_ = Stage::kNew;
  bool has_named_files_ = false;  // note_files()
  bool are_files_left_ = false;   // that discard() could not remove
};

}  // namespace tilestone::engine
