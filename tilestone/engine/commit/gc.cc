#include "tilestone/engine/commit/unpublished.h"

#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/engine/commit/old_checkpoint_internal.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/commit/whole_removal_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/engine/open/look_around_internal.h"
#include "tilestone/format/index.h"
#include "tilestone/format/safetensors/safetensors.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone {
namespace engine {
namespace {

constexpr const char* kBeside = "../";  // before the name of a sibling
// A file of the same name may be whole, so it is not removed by its name.
constexpr const char* kUnfinished = "unfinished upload";

// One run of find_leftovers() or remove_leftovers() at a location.
class Cleaning {
 public:
  Cleaning(const Location& location, bool force)
      : storage_(location.storage()), siblings_(storage_), force_(force) {}

  // Keeps saves from beginning: a save holds the lock from its first file on.
  void lock() {
    if (storage_.list().empty()) return;  // only siblings can be removed
    lock_ = claim_location(storage_);
    if (lock_ == nullptr) fail_under_way();
  }

  void expect_unlocked() const {
    if (storage_.is_claimed(std::string(kLockName))) fail_under_way();
    for (const Sibling& sibling : siblings_.find()) {
      if (siblings_.is_alive(sibling)) fail_under_way();
    }
  }

  std::vector<Leftover> find() {
    Standing here = look_at(storage_, format_);
    const std::vector<std::string>& names = here.names;
    dead_ = siblings_.find();
    if (names.empty() && dead_.empty()) {
      throw Error(ErrorCode::kNotFound, "no file at " + storage_.describe());
    }
    const bool converted =
        here.found.format == nullptr && safetensors_format()->detect(here.of_checkpoint);
    if (converted) here.found = {safetensors_format(), pytorch_dialect()};
    existing_ = read_existing(storage_, here);
    if (lock_ != nullptr) finish_index(storage_, here, existing_.save_id);
    const Notes& notes = here.notes;
    const auto removed = here.is_removed ? files_of_removal(storage_) : std::nullopt;
    if (removed) removed_ = {removed->begin(), removed->end()};
    if (!existing_.found && !force_) refuse_lost(names, notes);
    replaced_ =
        find_replaced(storage_, converted ? *safetensors_format() : *format_, here.of_checkpoint);
    ended_ = notes.ended(existing_.save_id, !existing_.rank_local.empty());
    unread_ = notes.unread;
    fixed_names_ = notes.fixed_names;
    open_ = notes.open(!existing_.save_id.empty() && existing_.rank_local.empty());
    remains_ = here.remains;
    std::vector<Leftover> found = leftovers(names);
    if (found.empty() && !existing_.found && open_.empty() && kept_.empty()) refuse_strange(names);
    return found;
  }

  std::vector<Leftover> leftovers(const std::vector<std::string>& names) {
    std::vector<Leftover> found;
    go_through_uploads([&](const std::string& name) {
      found.push_back({name, 0, kUnfinished, "its save has ended"});
      return false;
    });
    for (const auto& [name, tag] : remains_) {
      const auto info = storage_.stat(name);
      if (info)
        found.push_back({name, info->size, "file of a killed save", "it was not published"});
    }
    for (const Sibling& sibling : dead_) {
      found.push_back({kBeside + sibling.name, siblings_.size_of(sibling),
                       "directory of the save " + sibling.save_id, why_not_needed(sibling)});
    }
    for (const std::string& name : names) {
      const auto reason = reason_of(name);
      const auto info = reason ? storage_.stat(name) : std::nullopt;
      if (info && info->regular) found.push_back({name, info->size, reason->what, reason->why});
    }
    return found;
  }

  // Logs the unpublished saves, and the saves whose files stay because no note mentions them.
  void report_kept() const {
    if (!open_.empty()) {
      log(LogLevel::kWarning, "files of an unpublished save stay in " + storage_.describe() + ": " +
                                  unpublished_text(storage_, open_));
    }
    for (const auto& [save_id, count] : kept_) {
      log(LogLevel::kWarning, std::to_string(count) + " files of the save " + save_id +
                                  " stay in " + storage_.describe() +
                                  ": it left no note here, so they may have been copied; force "
                                  "removes them");
    }
  }

  void remove(const std::vector<Leftover>& found) {
    remove_siblings();
    finish_removal(storage_);
    for (const Leftover& file : found) {
      const bool is_other = file.name.starts_with(kBeside) || file.what == kUnfinished ||
                            remains_.contains(file.name);
      if (!is_note(file.name) && !is_other) remove(file.name);
    }
    go_through_uploads([&](const std::string&) { return is_held(lock_.get()); });
    if (is_held(lock_.get())) remove_remains(storage_, remains_);
    // Notes are removed last, once the other files are durably removed. Without kReplacedName,
    // replaced rank-local metadata would be beside an ordinary index and make it ambiguous. Without
    // a save's note, its data files could not be recognized as leftovers.
    if (failure_ == nullptr && found.size() > dead_.size()) {
      storage_.settle("");
      for (const Leftover& file : found) {
        if (is_note(file.name)) remove(file.name);
      }
    }
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    remove_empty_directories();
    if (!existing_.found && lock_ != nullptr) remove_lock_directory(storage_, lock_);
  }

 private:
  [[noreturn]] void fail_under_way() const {
    engine::fail_under_way(storage_, "a save", "try again when it has ended");
  }

  // Removes empty directories of attempts that have an outcome, because only these do not begin
  // again.
  void remove_empty_directories() {
    for (const std::string& name :
         storage_.list_directories(std::string(kTilestoneDirectory) + "/")) {
      const auto own = parse_in_tilestone_directory(name + "/");
      if (!own || !storage_.stat(outcome_name(own->save_id))) continue;
      storage_.tidy(name);
    }
  }

  // Those of saves that began here and may not still be published. Others may be copies' that are
  // being made.
  void go_through_uploads(const std::function<bool(const std::string&)>& goes) {
    or_log(LogLevel::kWarning, "unfinished uploads can't be found or removed", [&] {
      storage_.discard_unfinished("", [&](const std::string& name) {
        const auto own = parse_tilestone_name(name);
        if (!own) return fixed_names_.contains(name) && goes(name);
        const bool began_here = force_ || ended_.contains(own->noted);
        return began_here && !open_.contains(own->save_id) && goes(name);
      });
    });
  }

  void remove_siblings() {
    for (const Sibling& sibling : dead_) {
      try {
        if (!siblings_.remove_dead(sibling)) fail_under_way();
      } catch (const Error& error) {
        if (error.code() == ErrorCode::kAlreadyExists) throw;
        if (error.code() != ErrorCode::kNotFound && !failure_) failure_ = std::current_exception();
      }
    }
  }

  std::string why_not_needed(const Sibling& sibling) const {
    if (!existing_.found || existing_.save_id != sibling.save_id) return "it was not published";
    return "it contains the checkpoint that the save " + sibling.save_id + " has replaced";
  }

  // Nothing here is a save's: the checkpoint may be elsewhere.
  void refuse_strange(const std::vector<std::string>& names) const {
    const std::string around = look_around(storage_, names);
    if (around.empty()) return;
    throw Error(ErrorCode::kNotFound,
                "no checkpoint, and nothing of a failed save, at " + storage_.describe())
        .with_hint(around);
  }

  void refuse_lost(const std::vector<std::string>& names, const Notes& notes) {
    const auto lost = find_lost(storage_, names, notes);
    if (!lost) return;
    if (lock_ == nullptr) expect_unlocked();
    if (any_checkpoint(storage_, *format_)) {  // published since the names were listed
      existing_ = read_existing(storage_, format_);
      return;
    }
    throw Error(ErrorCode::kCorrupt, lost->what + "; they are not removed as leftovers")
        .with_hint(lost->hint + "; force removes these files");
  }

  bool is_note(const std::string& name) const {
    const std::string_view kind = kind_of(name);
    return name == kReplacedName || name == kRemovedName || kind == kNoteKind ||
           kind == kTemporaryKind;
  }

  struct Reason {
    std::string what, why;
  };

  // Why the file can be removed; nullopt if it can't be.
  std::optional<Reason> reason_of(const std::string& name) {
    if (removed_.contains(name)) {
      return Reason{"file of a removed checkpoint", "its removal has begun, and not ended"};
    }
    if (name == kRemovedName) return Reason{"mark of a removal", "it lists the files to remove"};
    if (replaced_ && replaced_->files.contains(name)) {
      return Reason{"metadata of a rank-local checkpoint",
                    "the save " + existing_.save_id + " has replaced it"};
    }
    if (name == kReplacedName) {
      return Reason{
          "note of a replaced rank-local checkpoint",
          replaced_ ? "the files that it lists are removed" : "its save was not published"};
    }
    const auto own = parse_tilestone_name(name);
    if (!own || existing_.files.contains(name) || unread_.contains(name)) return std::nullopt;
    if (own->kind == kOutcomeKind || open_.contains(own->save_id)) return std::nullopt;
    if (!force_ && !is_leftover(*own, ended_)) {
      if (storage_.stat(name)) ++kept_[own->save_id];
      return std::nullopt;
    }
    return Reason{std::string(own->kind) + " of the save " + own->save_id,
                  why_not_needed(own->save_id)};
  }

  std::string why_not_needed(const std::string& save_id) const {
    if (!existing_.found) return "there is no checkpoint here: the save was not published";
    if (existing_.save_id.empty()) return "the checkpoint here is another writer's";
    if (existing_.save_id == save_id) return "the checkpoint of this save does not need it";
    return "the checkpoint here is of the save " + existing_.save_id;
  }

  void remove(const std::string& name) {
    if (!is_held(lock_.get())) fail_under_way();  // it was lost
    try {
      storage_.remove(name);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound && !failure_) failure_ = std::current_exception();
    }
  }

  Storage& storage_;
  const Siblings siblings_;
  // Where a directory looks like a checkpoint of several formats, it is read as one of this format.
  const std::shared_ptr<const Format> format_ = torch_dist_format();
  const bool force_;
  std::unique_ptr<StorageClaim> lock_;
  ExistingCheckpoint existing_;
  std::vector<Sibling> dead_;
  std::optional<Replaced> replaced_;
  Remains remains_;
  std::set<std::string> removed_;       // files of a checkpoint whose removal has begun
  std::set<std::string> ended_;         // saves whose files may be removed
  std::set<std::string> unread_;        // notes that could not be read
  std::set<std::string> fixed_names_;   // Notes::fixed_names
  std::set<std::string> open_;          // saves that may still become the checkpoint
  std::map<std::string, size_t> kept_;  // by save: how many files stay for lack of a note
  std::exception_ptr failure_;
};

}  // namespace
}  // namespace engine

std::vector<Leftover> find_leftovers(const Location& location, bool force) {
  engine::Cleaning cleaning(location, force);
  cleaning.expect_unlocked();
  std::vector<Leftover> found = cleaning.find();
  cleaning.expect_unlocked();  // a save that has begun meanwhile may own some of the files
  cleaning.report_kept();
  return found;
}

std::vector<Leftover> remove_leftovers(const Location& location, bool force) {
  // The lock file is made only if there are leftovers. That of a lease may be a dead process's,
  // which only taking it finds out.
  Storage& storage = location.storage();
  const bool has_lease =
      storage.facts().claims_are_leases() && storage.stat(std::string(engine::kLockName));
  if (!has_lease && find_leftovers(location, force).empty()) return {};
  engine::Cleaning cleaning(location, force);
  cleaning.lock();
  // The current metadata file may have been renamed by an interrupted save. It must be durable
  // before files that the previous one names are removed.
  if (!storage.list().empty()) storage.settle("");
  std::vector<Leftover> found = cleaning.find();
  if (has_lease) cleaning.report_kept();
  cleaning.remove(found);
  return found;
}

}  // namespace tilestone
