// A save without a communicator, as one process sees it. attempt.cc describes the protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

class Attempt {
 public:
  // Does not access the storage.
  Attempt(std::shared_ptr<Storage> location, AttemptHead head);

  const AttemptHead& head() const { return head_; }

  // Whether an error of this code, thrown while an attempt is published, is permanent: the cause is
  // what the ranks have left, or another checkpoint that was published first. Then no process can
  // publish the attempt.
  static bool is_final(ErrorCode code);

  // Whether its head exists.
  bool has_begun() const;

  // Begins the attempt, or joins it if it has begun. Returns false if it is already published.
  // Errors: kAlreadyExists where the location has another checkpoint, or a save with a communicator
  // is under way there; kMismatch where the ranks that joined before have other terms; kRankFailed
  // where the attempt was abandoned.
  bool join(Deadline deadline);

  // The first number from which `count` consecutive names of this rank's data files are free. An
  // earlier run of a restarted rank may have left files, and not always those with the lowest
  // numbers.
  int first_free_file(int rank, int count) const;

  // Whether a receipt of this rank exists, in its own file or in its group's merged file.
  bool has_receipt(int rank) const;
  // That receipt; nullopt if there is none.
  std::optional<AttemptReceipt> receipt_of(int rank) const;
  // Once the save is published: the receipt in its manifest; nullopt if that has been removed
  // since.
  std::optional<Receipt> published_receipt_of(int rank) const;
  // Whether it is certain that no receipt exists. Also false where that can't be determined.
  bool surely_lacks_receipt(int rank) const noexcept;
  // Publishes this rank's receipt. Returns false if another receipt of this rank exists and counts.
  // If it throws, the receipt may have been published all the same.
  bool leave_receipt(int rank, const AttemptReceipt& left, Deadline deadline);
  // Leaves a rank's error for the ranks that wait, unless an error is already there. Failures are
  // logged.
  void leave_failure(int rank, const Error& error, Deadline deadline) noexcept;
  // To be called after join(). Removes the failure that an earlier run of this rank has left,
  // because the rank is trying again. Also removes a failure that is damaged, or left by a rank
  // outside this save's world. Ranks that joined before ignore an old failure for some seconds
  // (wait_published).
  void take_back_failure(int rank);

  // Merges and publishes as far as the existing receipts allow. Returns true once the checkpoint
  // exists. With `group`, looks at that group first, and at the others only if it is complete;
  // without, looks at all groups.
  // Errors: kRankFailed where the attempt was abandoned; kAlreadyExists where another checkpoint
  // was published first; the errors of merging receipts that contradict each other.
  bool publish_if_complete(std::optional<int> group, int threads, Deadline deadline);

  // In torch's rank-local mode: publishes the metadata of a rank that has reported. Errors:
  // kAlreadyExists where the location has an index of another save; kRankFailed where this attempt
  // was abandoned.
  void publish_rank_metadata(int rank, Deadline deadline);
  // Calls publish_if_complete(), except in the rank-local mode. There it publishes no index, and
  // returns true once the metadata of all ranks exists.
  bool finish(std::optional<int> group, int threads, Deadline deadline);
  // In the rank-local mode, once the attempt is abandoned: removes the metadata of its ranks.
  void withdraw_rank_metadata();
  // Looks once more for the files of the ranks whose receipts have been merged: one may have been
  // lost since. Throws the errors of expect_files() in presence_internal.h.
  void expect_files_of_merged(int threads, Deadline deadline) const;
  // Throws what publishing on request would throw: if all ranks have reported, the errors of their
  // receipts and of missing files, and kAlreadyExists where the location has another checkpoint.
  // Publishes no index; it may merge groups' receipts.
  void expect_publishable(int threads, Deadline deadline);

  // The error of receipts that contradict each other, if all ranks have reported; nullopt: there is
  // none. Changes nothing.
  std::optional<Error> contradiction() const;

  // Waits until the checkpoint exists. Takes over from a publisher that stalls. Throws the failure
  // that a rank has left; at the deadline, kTimeout that names missing ranks.
  //
  // A failure that was there before this process joined may be from an earlier try of a rank that
  // tries again. It is thrown only if it still exists after some seconds of waiting.
  void wait_published(int threads, Deadline deadline);

  // The attempt's state. Looks up each file by its name, without listing a directory. `names`: how
  // many missing ranks to name.
  AttemptState look(size_t names) const;

 private:
  enum class Merged : uint8_t { kIncomplete, kBefore, kNow };
  struct Described {
    Descriptions made;
    std::optional<Replaced> replaced;  // in torch's rank-local mode
  };

  bool is_over() const;
  bool sync_receipt(int group) const;  // false: the receipt may not be durable
  bool is_published() const;
  bool is_published_and_clean() const;
  bool has_ended() const;
  bool ended_before() const;
  void begin(Deadline deadline);
  void make_head(Deadline deadline);
  void refuse_existing() const;
  void join_begun(const AttemptHead& begun) const;
  void expect_same_head(const AttemptHead& other) const;
  [[noreturn]] void fail_no_checkpoint() const;
  [[noreturn]] void fail_abandoned() const;
  [[noreturn]] void fail_missing() const;
  std::vector<int> missing_of(int group) const;
  std::optional<Error> failure_to_throw(std::optional<Outcome> outcome, bool is_patient);
  void expect_begun() const;
  bool all_left(int group);
  bool all_merged();
  Merged merge_group(int group, int threads, Deadline deadline);
  bool merge_groups(std::optional<int> group, int threads, Deadline deadline);
  void remove_receipts(int group) const;
  std::optional<Described> describe() const;
  Described describe(const std::vector<Bytes>& left_by_rank) const;
  bool publish(Deadline deadline);  // false: another process has published it
  bool publish_or_find(const IndexFile& file, Deadline deadline) const;
  void publish_once(const std::string& name, const std::string& temp_name, ByteView bytes,
                    Deadline deadline) const;
  static void expect_same_keys(const std::vector<AttemptReceipt>& left);
  static void expect_all_objects(const std::vector<AttemptReceipt>& left,
                                 const std::vector<Receipt>& receipts);
  void report_differing(const std::string& what, int rank) const;
  // What the ranks hold (attempt_contents.cc)
  void expect_same_lists(const std::vector<AttemptReceipt>& left) const;
  void expect_same_contents(const std::vector<AttemptReceipt>& left,
                            const std::vector<Receipt>& receipts) const;
  static void expect_declared(const std::vector<AttemptReceipt>& left,
                              const std::vector<Bytes>& encoded);
  bool merge_if_complete(std::optional<int> group, int threads, Deadline deadline);
  void clean() const;

  // Dialects whose files have fixed names (attempt_fixed_names.cc)
  void refuse_fixed_names(const std::vector<std::string>& names) const;
  void expect_still_free(Deadline deadline) const;
  Index files_of_dialect(AttemptReceipt& of_rank_0) const;
  void publish_index(const Index& index, Deadline deadline) const;
  void expect_own_or_none(const IndexFile& file) const;
  [[noreturn]] void fail_not_first(const std::string& file) const;
  void expect_first() const;
  [[noreturn]] void fail_foreign(const IndexFile& file) const;

  // Torch's rank-local mode (attempt_rank_local.cc)
  void refuse_other_attempts(Deadline deadline) const;
  bool may_be_open_beside(const std::string& save_id) const;
  void refuse_rank_metadata(int begin, int end) const;
  bool end_earlier_try(const std::string& save_id, Deadline deadline) const;
  void publish_rank_file(Receipt receipt, Deadline deadline) const;
  std::set<std::string> unite_objects(std::vector<Receipt>& receipts,
                                      std::vector<Bytes>& encoded) const;
  Replaced rank_files_of(const std::vector<Receipt>& receipts) const;
  void expect_only(const Replaced& replaced) const;
  void mark_replaced(const Replaced& replaced, Deadline deadline) const;
  void remove_replaced(const Replaced& replaced) const;

  std::shared_ptr<Storage> location_;
  AttemptHead head_;
  std::shared_ptr<const Format> format_;
  std::shared_ptr<const Dialect> dialect_;
  std::optional<Bytes> old_failure_;  // found when this process joined; reset once it is gone
  int next_rank_ = 0;                 // where to look first for a missing receipt
  int next_group_ = 0;                // likewise, for a missing group
};

}  // namespace tilestone::engine
