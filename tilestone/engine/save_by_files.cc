#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/lease_internal.h"
#include "tilestone/engine/coordination_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/reported_before_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save.h"
#include "tilestone/engine/save_share_internal.h"
#include "tilestone/engine/save_steps_internal.h"
#include "tilestone/engine/session_parts_internal.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/content_hash.h"
#include "tilestone/version.h"

namespace tilestone::engine {
namespace {

constexpr int kMaxTries = 8;  // to find data file names that no other process of this rank takes

void refuse(bool refused, const std::string& what, const std::string& hint) {
  if (refused) throw Error(ErrorCode::kUnsupported, what).with_hint(hint);
}

AttemptHead head_of(const SaveOptions& options) {
  AttemptHead head;
  head.save_id = save_id_of(options.by_files->token, options.by_files->number);
  head.world_size = options.by_files->world_size;
  head.format = format_of(options)->name();
  head.dialect = dialect_of(options)->name();
  head.writer = writer_name();
  head.common_differs = static_cast<uint8_t>(options.checks.common_differs);
  head.rank_local = options.by_files->torch_rank_local;
  head.token = xxh3_64(as_bytes(options.by_files->token));
  head.number = options.by_files->number;
  head.attributes = options.attributes;
  return head;
}

// Coordinates a save by files. commit/attempt.cc describes and numbers the steps of the protocol.
class CoordinationByFiles final : public Coordination {
 public:
  CoordinationByFiles(const Location& location, const SaveOptions& options, Deadline deadline,
                      std::shared_ptr<SessionParts> session)
      : Coordination(deadline, std::move(session)),
        files_(*options.by_files),
        storage_(location.shared()),
        attempt_(storage_, head_of(options)) {
    result_.save_id = attempt_.head().save_id;
    set_options(share_, options);
    share_.report_held = true;
    share_.rank = files_.rank;
    share_.world_size = files_.world_size;
    share_.save_id = result_.save_id;
  }

  void plan(const Bring& bring) override {
    refuse_by_files(share_);
    try {
      plan_locally(bring());
    } catch (...) {
      leave_planning_failure(current_error());
      throw;
    }
    std::optional<LeftReport> before;
    try {
      before = begin();
    } catch (...) {
      leave_beginning_failure(current_error());
      throw;
    }
    if (!is_done_ && !is_reported_) return;
    // The report that is there can still be published, whatever state this rank has now.
    expect_state_of_before(before);
    write_nothing();
  }

  void write(const WriteShare& write) override {
    if (is_done_ || is_reported_) return;
    try {
      // Encode this now, while the tensors of the common state still have memory.
      if (files_.rank == 0)
        of_dialect_ = share_.dialect->encode_index(share_.items, *share_.format);
      report_ = write_under_free_names(write);
      report_->state = state_of(share_);
      if (files_.torch_rank_local) report_->held.clear();  // each rank writes all that it has
    } catch (...) {
      failed_ = std::current_exception();
      lease_.reset();
      attempt_.leave_failure(files_.rank, current_error(), Deadline::after(kFailureTime));
    }
  }

  void report() override {
    if (failed_) std::rethrow_exception(failed_);
    if (is_done_) return;
    bool counts = true;
    try {
      if (report_) {
        counts = attempt_.leave_report(files_.rank, left_of(*report_), deadline_);
        counts ? note_result() : withdraw_written();
        is_reported_ = true;
      }
      lease_.reset();
      if (files_.torch_rank_local) attempt_.publish_rank_metadata(files_.rank, deadline_);
    } catch (...) {
      lease_.reset();
      const Error error = current_error();
      const bool reports = report_ && !is_reported_;
      if (reports && attempt_.surely_lacks_report(files_.rank)) remove_written();
      attempt_.leave_failure(files_.rank, error, Deadline::after(kFailureTime));
      throw;
    }
    if (!counts) expect_same_as_counted();
  }

  SaveResult publish() override {
    if (!is_done_) publish_or_wait();
    return result_;
  }

  // If this rank has reported, do nothing: the other ranks can complete the save.
  void give_up(const Error& why) noexcept override {
    if (is_done_ || is_reported_ || failed_) return;
    if (report_) remove_written();
    lease_.reset();
    attempt_.leave_failure(files_.rank, why, Deadline::after(kFailureTime));
  }

 private:
  static constexpr std::chrono::duration<double> kFailureTime{10};  // for leaving a failure

  // This rank has failed before it joined. Leaves the failure, so that the other ranks do not wait.
  void leave_planning_failure(const Error& error) noexcept {
    if (files_.world_size == 1) return;
    try {
      const Deadline deadline = Deadline::after(kFailureTime);
      if (!attempt_.join(deadline)) return;
      if (attempt_.has_report(files_.rank)) return;  // from before a restart
      attempt_.take_back_failure(files_.rank);       // likewise
      attempt_.leave_failure(files_.rank, error, deadline);
    } catch (...) {
      log(LogLevel::kDebug,
          std::string(
              "this rank's failure could not be reported to the other ranks of the save: ") +
              current_error().what());
    }
  }

  // This rank could not begin and will not write. Leaves the failure for the ranks that wait. There
  // is nothing to report if another checkpoint is at the location or the save was abandoned: the
  // other ranks find that out themselves.
  void leave_beginning_failure(const Error& error) noexcept {
    if (is_reported_) return;  // the other ranks need nothing more
    if (error.code() == ErrorCode::kAlreadyExists || error.code() == ErrorCode::kRankFailed) return;
    try {
      if (!attempt_.has_begun()) return;
    } catch (const Error&) {
      // Unknown: try to leave the failure.
    }
    attempt_.leave_failure(files_.rank, error, Deadline::after(kFailureTime));
  }

  // Joins the attempt, and creates the lease that shows that this rank is working. Returns the
  // report that this rank left before a restart, if there is one.
  std::optional<LeftReport> begin() {
    is_done_ = !attempt_.join(deadline_);
    if (is_done_) return std::nullopt;
    attempt_.take_back_failure(files_.rank);
    is_reported_ = attempt_.has_report(files_.rank);
    if (is_reported_) return attempt_.report_of(files_.rank);
    make_lease();
    return std::nullopt;
  }

  void expect_state_of_before(const std::optional<LeftReport>& before) const {
    if (before) {
      return expect_reported_state(RankReport::decode(before->report), &*before, share_);
    }
    if (!is_done_) return;
    const auto published = attempt_.published_report_of(files_.rank);
    if (published) expect_reported_state(*published, nullptr, share_);
  }

  // Called if this rank's part was saved before.
  void write_nothing() {
    share_.assignment = {};
    result_.copies = result_.copy_bytes = 0;
    log(LogLevel::kWarning,
        "rank " + std::to_string(files_.rank) + ": nothing is written, because the save " +
            result_.save_id + " at " + storage_->describe() + " was already " +
            (is_done_ ? "published" : "written by this rank") +
            " under this token and number; use another number to save another state");
  }

  void plan_locally(const Brought& brought) {
    check_options(*brought.options);
    share_.options = *brought.options;  // now including what only this rank uses
    take_state(share_, *brought.state);
    check_items(share_, *storage_);
    replicas_ = replicas_to_name(share_);
    share_.local = make_local_plan(share_.items);
    if (files_.torch_rank_local) {
      share_.assignment = all_that_is_held(share_.local);
    } else {
      plan_by_holders();
    }
    // Only after planning, because the planner copies every common object whose content is noted.
    // Even if the ranks compare nothing: a restarted rank compares its state with its own report.
    note_contents(share_, false);
    if (brought.compared != nullptr) note_compared(*brought.compared);
  }

  void plan_by_holders() {
    check_holders();
    if (share_.options.copies.has_value()) note_contents_of_copied(share_);
    share_.assignment = plan_by_rule(session_.get(), share_);
    settle_copies(share_, result_);
    warn_of_undeclared();
  }

  // Compares this common state instead of the one that is saved.
  void note_compared(const StateDict& compared) {
    const auto common = items_of(compared, share_).common;
    if (!common) return;
    for (PlanObject& object : share_.local.objects) {
      if (object.key == share_.dialect->common_object()) object.content = content_hash(*common);
    }
  }

  // A holder outside the save might be the one chosen to write the chunk.
  void check_holders() const {
    for (const PlanChunk& chunk : share_.local.chunks) {
      if (chunk.holders == PlanChunk::kUnknown) continue;
      const std::vector<int>& holders = share_.local.holder_sets[chunk.holders];
      if (holders.front() >= 0 && holders.back() < files_.world_size) continue;
      const int outside = holders.front() < 0 ? holders.front() : holders.back();
      throw Error(ErrorCode::kInvalidArgument,
                  "rank " + std::to_string(outside) + " is declared to hold box " +
                      to_string(chunk.box) + ", but the save's world_size is " +
                      std::to_string(files_.world_size))
          .with_key(share_.local.tensors[chunk.tensor].key)
          .with_rank(files_.rank);
    }
  }

  // Warns about common tensors whose holders are not declared: every rank writes them.
  void warn_of_undeclared() const {
    std::set<std::string_view> keys;
    uint64_t bytes = 0;
    for (const uint32_t i : share_.assignment.chunks) {
      const PlanChunk& chunk = share_.local.chunks[i];
      if (chunk.holders != PlanChunk::kUnknown || !chunk.common) continue;
      const PlanTensor& tensor = share_.local.tensors[chunk.tensor];
      keys.insert(tensor.key);
      bytes += static_cast<uint64_t>(chunk.box.numel()) * itemsize(tensor.dtype);
    }
    if (keys.empty() || files_.world_size == 1) return;
    log_once(LogLevel::kWarning,
             "the holders of " + std::to_string(keys.size()) + " tensors (" +
                 std::to_string(bytes) +
                 " bytes on this rank) are not declared, so each rank that has them writes them; "
                 "the first is " +
                 std::string(*keys.begin()));
  }

  void make_lease() {
    const int group = attempt_.head().group_of(files_.rank);
    storage_->make_directory(group_directory(result_.save_id, group));
    lease_.emplace(storage_, lease_name(attempt_.head(), files_.rank),
                   group_temporary(result_.save_id, group, "lease"));
  }

  RankReport write_under_free_names(const WriteShare& write) {
    for (int tries = 1;; ++tries) {
      try {
        const int first =
            attempt_.first_free_file(files_.rank, share_.options.resources.files_per_rank);
        return write({storage_.get(), first, deadline_});
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kAlreadyExists || tries == kMaxTries) throw;
      }
    }
  }

  void note_result() {
    result_.items_written = report_->chunks.size() + report_->objects.size();
    for (const ReportedFile& file : report_->files) result_.bytes_written += file.size;
  }

  // Not a failure of the save: the report that counts can be published.
  void expect_same_as_counted() const {
    const auto left = attempt_.report_of(files_.rank);
    const auto counted = left ? std::optional(RankReport::decode(left->report))
                              : attempt_.published_report_of(files_.rank);
    if (counted) expect_same_report(*counted, *report_);
  }

  // Another process has reported as this rank, and its report counts.
  void withdraw_written() {
    remove_written();
    result_.copies = result_.copy_bytes = 0;
    log(LogLevel::kWarning, "rank " + std::to_string(files_.rank) +
                                ": what this process has written is removed, because another "
                                "process has reported as this rank of the save " +
                                result_.save_id);
  }

  void remove_written() noexcept {
    std::vector<std::string> names;
    for (const ReportedFile& file : report_->files) names.push_back(file.name);
    remove_files(*storage_, names);
  }

  LeftReport left_of(const RankReport& report) const {
    LeftReport left;
    left.report = report.encode();
    std::set<std::string_view> common;
    for (const PlanObject& object : share_.local.objects) {
      if (object.common) common.insert(object.key);
    }
    ByteWriter keys;
    for (const std::string_view key : common) keys.string(key);
    left.common_keys = xxh3_64(keys.bytes());
    left.held = held_contents(share_.local);
    left.lists = share_.lists;
    left.unwritten_objects = unwritten_objects();
    left.of_dialect = of_dialect_;
    left.replicas = replicas_;
    return left;
  }

  std::vector<std::string> unwritten_objects() const {
    std::vector<bool> written(share_.local.objects.size(), false);
    for (const uint32_t i : share_.assignment.objects) written[i] = true;
    std::vector<std::string> keys;
    for (size_t i = 0; i < written.size(); ++i) {
      const PlanObject& object = share_.local.objects[i];
      if (!written[i] && !object.common) keys.push_back(object.key);
    }
    return keys;
  }

  void publish_or_wait() {
    const int group = attempt_.head().group_of(files_.rank);
    try {
      result_.published = attempt_.finish(group, share_.options.resources.threads, deadline_);
    } catch (Error& error) {
      if (error.code() == ErrorCode::kCoverage && error.hint().empty()) {
        error.with_hint(
            "every rank that is declared to hold a tensor must have it; from Python, arrays that "
            "are not wrapped are declared to be on all ranks");
      }
      // Report the failure to the ranks that wait.
      if (Attempt::is_final(error.code())) {
        attempt_.leave_failure(files_.rank, error, Deadline::after(kFailureTime));
      }
      throw;
    }
    if (result_.published || !files_.wait) return;
    attempt_.wait_published(share_.options.resources.threads, deadline_);
    result_.published = true;
  }

  const ByFiles files_;
  const std::shared_ptr<Storage> storage_;
  Attempt attempt_;
  bool is_done_ = false;  // already published: this rank has nothing to do
  std::optional<Lease> lease_;
  std::optional<RankReport> report_;  // of what this process has written
  Index of_dialect_;                  // on rank 0: the dialect's files
  ReplicaNames replicas_;             // additional names for the index
  bool is_reported_ = false;          // by this process, or before a restart
  std::exception_ptr failed_;         // in write(); already left for the other ranks
  SaveResult result_;
};

}  // namespace

void refuse_by_files(const SaveShare& share) {
  const SaveOptions& options = share.options;
  const Format& format = *share.format;
  const Dialect& dialect = *share.dialect;
  const bool rank_local = options.by_files->torch_rank_local;
  refuse(
      format.needs_grid() || format.has_fixed_names(),
      "the format " + std::string(format.name()) +
          " can't be saved without a communicator: its data files have fixed names, so two saves "
          "would write to the same files",
      "save with a communicator, or in the format torch_dist");
  refuse(dialect.shares_directory(),
         "the dialect " + std::string(dialect.name()) +
             " can't be saved without a communicator: another program writes a part of the "
             "checkpoint before and after the save",
         "save with a communicator, or save everything in the dialect megatron");
  refuse(rank_local && dialect.has_fixed_names(),
         "torch's rank-local mode does not support the dialect " + std::string(dialect.name()),
         "save in the dialect pytorch, or without torch_rank_local");
  refuse(rank_local && format.rank_index_name(0).empty(),
         "the format " + std::string(format.name()) + " has no rank-local checkpoints",
         "save in the format torch_dist");
  refuse(rank_local && options.copies.has_value(),
         "torch's rank-local mode does not support copies: each rank writes all that it holds",
         "save without copies");
  refuse(options.checks.access, "checks.access needs a communicator",
         "without it, elements that are missing or written twice are found at publishing");
}

std::unique_ptr<Coordination> coordinate_by_files(const Location& location,
                                                  const SaveOptions& options, Deadline deadline,
                                                  std::shared_ptr<SessionParts> session) {
  check_by_files(options);  // the other options are checked when failures can be reported
  return std::make_unique<CoordinationByFiles>(location, options, deadline, std::move(session));
}

}  // namespace tilestone::engine

namespace tilestone {

SaveResult save_by_files(const Location& location, const SaveOptions& options,
                         const std::function<SaveRequest()>& prepare, Deadline deadline) {
  try {
    return engine::save_in_a_row(engine::coordinate_by_files(location, options, deadline),
                                 engine::bring_request(prepare));
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
