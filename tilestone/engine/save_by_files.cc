#include "tilestone/engine/save_by_files_internal.h"

#include <algorithm>
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
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save.h"
#include "tilestone/engine/save_items_internal.h"
#include "tilestone/engine/write/writer_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/version.h"

namespace tilestone::engine {
namespace {

constexpr int kMostNames = 8;  // tries to find names for data files that no twin of this rank takes

void refuse(bool refused, const std::string& what, const std::string& hint) {
  if (refused) throw Error(ErrorCode::kUnsupported, what).with_hint(hint);
}

AttemptHead head_of(const SaveOptions& options) {
  AttemptHead head;
  head.save_id = save_id_of(options.by_files->token, options.by_files->number);
  head.world_size = options.by_files->world_size;
  head.format = options.format ? options.format->name() : torch_dist_format()->name();
  head.dialect = options.dialect ? options.dialect->name() : pytorch_dialect()->name();
  head.writer = std::string("Tilestone ") + kVersion;
  head.common_differs = static_cast<uint8_t>(options.common_differs);
  head.attributes = options.attributes;
  return head;
}

class FileSaving {
 public:
  FileSaving(const Location& location, const SaveOptions& options, Deadline deadline)
      : options_(options),
        files_(*options.by_files),
        deadline_(deadline),
        format_(options.format ? options.format : torch_dist_format()),
        dialect_(options.dialect ? options.dialect : pytorch_dialect()),
        storage_(location.shared()),
        attempt_(storage_, head_of(options)) {
    result_.save_id = attempt_.head().save_id;
  }

  SaveResult run(const StateDict& state) {
    refuse_kinds();
    try {
      plan(state);
    } catch (...) {
      tell_of_failure(current_error());
      throw;
    }
    if (!join()) return result_;  // this rank's part was published before
    try {
      attempt_.take_back_failure(files_.rank);
      write();
    } catch (...) {
      attempt_.leave_failure(files_.rank, current_error(), Deadline::after(kForFailure));
      throw;
    }
    publish();
    return result_;
  }

  // What options alone say, on this rank as on all.
  void refuse_kinds() const {
    refuse(format_->needs_grid() || format_->has_fixed_names(),
           "the format " + std::string(format_->name()) + " can't be saved without a communicator",
           "save with a communicator, or in the format torch_dist");
    refuse(dialect_->has_fixed_names() || dialect_->shares_directory(),
           "the dialect " + std::string(dialect_->name()) +
               " can't be saved without a communicator: its files have fixed names, which two "
               "attempts would share",
           "save with a communicator, or in the dialect pytorch");
    refuse(options_.validate_access, "validate_access needs a communicator",
           "what is missing or written twice is found when the save is published");
  }

  // Of a rank that comes with nothing that can be saved: the others shall not wait for it.
  void tell_of_failure(const Error& error) noexcept {
    if (files_.world_size == 1) return;
    try {
      const Deadline deadline = Deadline::after(kForFailure);
      if (!attempt_.join(deadline)) return;
      if (storage_->stat(report_name(attempt_.head(), files_.rank))) return;  // of an earlier life
      attempt_.leave_failure(files_.rank, error, deadline);
    } catch (...) {
      log(LogLevel::kDebug, std::string("the other ranks of a save don't hear of a failure: ") +
                                current_error().what());
    }
  }

 private:
  static constexpr std::chrono::duration<double> kForFailure{10};

  bool join() {
    try {
      return attempt_.join(deadline_);
    } catch (const Error& error) {
      // This rank will not write, and those that agree with the first one wait for it.
      if (error.code() == ErrorCode::kMismatch) {
        attempt_.leave_failure(files_.rank, error, Deadline::after(kForFailure));
      }
      throw;
    }
  }

  void plan(const StateDict& state) {
    items_ = items_of(state, *dialect_, *format_);
    check_items(items_, options_, *format_);
    local_ = make_local_plan(items_);
    if (options_.common_differs != SaveOptions::Differing::kIgnore) {
      note_contents(items_, *format_, local_);
    }
    check_holders();
    assignment_ = plan_save_by_rule(local_, files_.rank);
    tell_of_undeclared();
  }

  // A holder that takes no part might be the one that is to write.
  void check_holders() const {
    for (const PlanChunk& chunk : local_.chunks) {
      if (chunk.holders == PlanChunk::kUnknown) continue;
      const std::vector<int>& holders = local_.holder_sets[chunk.holders];
      if (holders.front() >= 0 && holders.back() < files_.world_size) continue;
      const int outside = holders.front() < 0 ? holders.front() : holders.back();
      throw Error(ErrorCode::kInvalidArgument,
                  "rank " + std::to_string(outside) + " is declared to hold box " +
                      to_string(chunk.box) + ", and the world_size of the save is " +
                      std::to_string(files_.world_size))
          .with_key(local_.tensors[chunk.tensor].key)
          .with_rank(files_.rank);
    }
  }

  // Each of them is written by every rank that has it.
  void tell_of_undeclared() const {
    std::set<std::string_view> keys;
    uint64_t bytes = 0;
    for (const uint32_t i : assignment_.chunks) {
      const PlanChunk& chunk = local_.chunks[i];
      if (chunk.holders != PlanChunk::kUnknown || !chunk.common) continue;
      const PlanTensor& tensor = local_.tensors[chunk.tensor];
      keys.insert(tensor.key);
      bytes += static_cast<uint64_t>(chunk.box.numel()) * itemsize(tensor.dtype);
    }
    if (keys.empty() || files_.world_size == 1) return;
    log_once(LogLevel::kWarning,
             "nothing says which ranks have the same tensors as this one, so each of them writes "
             "them: " +
                 std::to_string(keys.size()) + " tensors of " + std::to_string(bytes) +
                 " bytes on this rank, the first " + std::string(*keys.begin()));
  }

  void write() {
    if (storage_->stat(report_name(attempt_.head(), files_.rank))) return;  // of an earlier life
    storage_->make_directory(
        group_directory(result_.save_id, attempt_.head().group_of(files_.rank)));
    const Lease lease(storage_, lease_name(attempt_.head(), files_.rank),
                      attempt_temporary(result_.save_id, "lease-" + std::to_string(files_.rank)));
    const RankReport report = write_items();
    result_.items_written = report.chunks.size() + report.objects.size();
    for (const ReportedFile& file : report.files) result_.bytes_written += file.size;
    if (!attempt_.leave_report(files_.rank, left_of(report), deadline_)) {
      std::vector<std::string> names;
      for (const ReportedFile& file : report.files) names.push_back(file.name);
      remove_files(*storage_, names);
    }
  }

  RankReport write_items() {
    for (int tries = 1;; ++tries) {
      WriteTask task{&items_,     &local_,           assignment_,     true,
                     files_.rank, files_.world_size, result_.save_id, 0};
      task.first_file = attempt_.first_free_file(files_.rank);
      try {
        return engine::write_items(*storage_, *format_, task, options_, deadline_);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kAlreadyExists || tries == kMostNames) throw;
      }
    }
  }

  LeftReport left_of(const RankReport& report) const {
    LeftReport left;
    left.report = report.encode();
    std::map<std::string_view, uint64_t> common;
    for (const PlanObject& object : local_.objects) {
      if (object.common) common.emplace(object.key, object.content);
    }
    ByteWriter keys, contents;
    for (const auto& [key, content] : common) {
      keys.string(key);
      contents.u64(content);
    }
    left.common_keys = xxh3_64(keys.bytes());
    const bool compares = options_.common_differs != SaveOptions::Differing::kIgnore;
    left.common_contents = compares ? std::max<uint64_t>(1, xxh3_64(contents.bytes())) : 0;
    return left;
  }

  void publish() {
    const int group = attempt_.head().group_of(files_.rank);
    try {
      result_.published = attempt_.publish_if_complete(group, options_.threads, deadline_);
    } catch (Error& error) {
      if (error.code() == ErrorCode::kCoverage && error.hint().empty()) {
        error.with_hint(
            "what is declared to be on several ranks, as arrays that are not wrapped "
            "are from Python, is on every one of them");
      }
      // What ranks say contradicts, so nobody can publish it; those who wait shall hear why.
      if (error.code() == ErrorCode::kMismatch || error.code() == ErrorCode::kCoverage) {
        attempt_.leave_failure(files_.rank, error, Deadline::after(kForFailure));
      }
      throw;
    }
    if (result_.published || !files_.wait) return;
    attempt_.wait_published(files_.rank, options_.threads, deadline_);
    result_.published = true;
  }

  const SaveOptions& options_;
  const ByFiles& files_;
  const Deadline deadline_;
  const std::shared_ptr<const Format> format_;
  const std::shared_ptr<const Dialect> dialect_;
  const std::shared_ptr<Storage> storage_;
  Attempt attempt_;
  Items items_;
  LocalSavePlan local_;
  Assignment assignment_;
  SaveResult result_;
};

}  // namespace

SaveResult save_by_files(const StateDict& state, const Location& location,
                         const SaveOptions& options, Deadline deadline) {
  check_options(options);
  return FileSaving(location, options, deadline).run(state);
}

}  // namespace tilestone::engine

namespace tilestone {

SaveResult save_by_files(const Location& location, const SaveOptions& options,
                         const std::function<SaveRequest()>& prepare, Deadline deadline) {
  try {
    engine::check_options(options);
    engine::FileSaving saving(location, options, deadline);
    saving.refuse_kinds();
    std::optional<SaveRequest> made;
    try {
      made.emplace(prepare());
    } catch (...) {
      saving.tell_of_failure(current_error());
      throw;
    }
    const SaveRequest& request = *made;
    return engine::save_by_files(request.state, request.location, request.options, deadline);
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
