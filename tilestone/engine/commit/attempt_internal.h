// A save without a communicator, from the view of one process. The protocol stands in attempt.cc.
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
#include "tilestone/engine/open/attempt_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/report.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

class Attempt {
 public:
  // Nothing is looked at yet.
  Attempt(std::shared_ptr<Storage> location, AttemptHead head);

  const AttemptHead& head() const { return head_; }

  // Whether an error of this code, thrown while an attempt is published, comes of what the ranks
  // have left, or of another checkpoint that has come first: nobody can publish it then.
  static bool is_final(ErrorCode code);

  // Whether its head stands.
  bool has_begun() const;

  // Begins the attempt, or finds that it has begun. False: it was published before. Errors:
  // kAlreadyExists where another checkpoint stands at the location or is being saved with a
  // communicator; kMismatch where the ranks that came before say something else; kRankFailed where
  // it was abandoned.
  bool join(Deadline deadline);

  // From which number on `count` names of this rank's data files are free: a rank that died and was
  // started again has left some, and not always the lowest.
  int first_free_file(int rank, int count) const;

  // Whether a report of this rank is there, by itself or merged with its group's.
  bool has_report(int rank) const;
  // That report; nullopt: there is none.
  std::optional<RankReport> report_of(int rank) const;
  // Whether it is certain that there is none. False too where that can't be found out.
  bool surely_lacks_report(int rank) const noexcept;
  // False: this rank has another one, which counts. Where it throws, the report may stand all the
  // same.
  bool leave_report(int rank, const LeftReport& left, Deadline deadline);
  // Leaves a rank's error for those who wait, unless there is one. Failures are logged.
  void leave_failure(int rank, const Error& error, Deadline deadline) noexcept;
  // After join(): what an earlier life of this rank has left there goes, as it is trying again. So
  // does what a rank left that is none of this save's world, and what is damaged.
  // Those who came before that wait for it a while (wait_published).
  void take_back_failure(int rank);

  // Merges and publishes as far as the reports that are there allow it; true once the checkpoint
  // exists. `group`: looks into this group first, and into the others only if it is complete; none:
  // into all. Errors: kRankFailed where it was abandoned, kAlreadyExists where another checkpoint
  // was published first; those of merging reports that contradict each other.
  bool publish_if_complete(std::optional<int> group, int threads, Deadline deadline);

  // In torch's rank-local mode: publishes the metadata of a rank whose report is there. Errors:
  // kAlreadyExists where an index of another save stands, kRankFailed where this one was abandoned.
  void publish_rank_metadata(int rank, Deadline deadline);
  // publish_if_complete(), but in that mode nothing is published then: it is true once all ranks'
  // metadata stands.
  bool finish(std::optional<int> group, int threads, Deadline deadline);
  // In that mode, once the attempt is abandoned: the metadata of its ranks goes.
  void withdraw_rank_metadata();
  // What publishing would throw because of what the ranks have left, if all have, or because
  // another checkpoint stands there. Publishes nothing.
  void expect_publishable(int threads, Deadline deadline);

  // Returns once the checkpoint exists. Throws what a rank has left as its failure, and at the
  // deadline kTimeout that names ranks that are missing. Takes over from a publisher that stalls.
  // A failure that was there when this process came may be of an earlier try of ranks that all try
  // again: it is thrown only if it still stands after some seconds of waiting.
  void wait_published(int threads, Deadline deadline);

  // Found by names, without listing. `names`: how many missing ranks are named.
  AttemptState look(size_t names) const;

 private:
  enum class Merged : uint8_t { kIncomplete, kBefore, kNow };
  struct Described {
    Descriptions made;
    std::optional<Replaced> replaced;  // in torch's rank-local mode
  };

  bool is_over() const;
  bool sync_report(int group) const;  // and that it is its group's; false: it may not be durable
  bool is_published() const;
  bool is_published_and_clean() const;
  bool has_ended() const;
  bool ended_before() const;
  void begin(Deadline deadline);
  void make_head(Deadline deadline);
  void refuse_standing() const;
  void join_begun(const AttemptHead& begun) const;
  void expect_same_head(const AttemptHead& other) const;
  [[noreturn]] void fail_not_standing() const;
  [[noreturn]] void fail_abandoned() const;
  [[noreturn]] void fail_missing() const;
  std::vector<int> missing_of(int group) const;
  std::optional<Error> heard_of(std::optional<Outcome> outcome, bool is_patient);
  void expect_begun() const;
  std::optional<Bytes> counted_report(int rank) const;
  std::vector<std::optional<Bytes>> counted_reports(int group) const;
  bool all_reported(int group);
  bool all_merged();
  Merged merge_group(int group, int threads, Deadline deadline);
  bool merge_groups(std::optional<int> group, int threads, Deadline deadline);
  void remove_reports(int group) const;
  std::optional<std::vector<Bytes>> read_group(int group) const;
  std::optional<Described> describe() const;
  bool publish(Deadline deadline);  // false: somebody else has
  bool publish_or_find(const IndexFile& file, Deadline deadline) const;
  void publish_once(const std::string& name, const std::string& temp_name, ByteView bytes,
                    Deadline deadline) const;
  void expect_one_common_state(const std::vector<LeftReport>& left) const;
  static void expect_all_objects(const std::vector<LeftReport>& left,
                                 const std::vector<RankReport>& reports);
  void tell_of_differing(const std::string& what, int rank) const;
  bool merge_if_complete(std::optional<int> group, int threads, Deadline deadline);
  void clean() const;

  // Dialects whose files have fixed names (attempt_fixed_names.cc)
  void refuse_fixed_names(const std::vector<std::string>& names) const;
  void expect_still_free(Deadline deadline) const;
  Index files_of_dialect(LeftReport& of_rank_0) const;
  void publish_index(const Index& index, Deadline deadline) const;
  void expect_own_or_none(const IndexFile& file) const;
  [[noreturn]] void fail_second(const IndexFile& file) const;
  [[noreturn]] void fail_foreign(const IndexFile& file) const;

  // Torch's rank-local mode (attempt_rank_local.cc)
  void refuse_other_attempts(Deadline deadline) const;
  bool may_stand_beside(const std::string& save_id) const;
  void refuse_rank_metadata() const;
  bool end_earlier_try(const std::string& save_id, Deadline deadline) const;
  void publish_rank_file(RankReport report, Deadline deadline) const;
  std::set<std::string> unite_objects(std::vector<RankReport>& reports,
                                      std::vector<Bytes>& encoded) const;
  Replaced rank_files_of(const std::vector<RankReport>& reports) const;
  void expect_only(const Replaced& replaced) const;
  void mark_replaced(const Replaced& replaced, Deadline deadline) const;
  void remove_replaced(const Replaced& replaced) const;

  std::shared_ptr<Storage> location_;
  AttemptHead head_;
  std::shared_ptr<const Format> format_;
  std::shared_ptr<const Dialect> dialect_;
  std::optional<Bytes> old_failure_;  // that was there when this process came, as long as it stands
  int next_rank_ = 0;  // where to look first for a report, or a group, that is missing
  int next_group_ = 0;
};

}  // namespace tilestone::engine
