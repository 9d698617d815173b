// How the steps of a run are removed: as checkpoints are that go as a whole
// (commit/whole_removal.cc), under the claim of the step's folder. Then the folder goes, and with
// it the claim's file, in this order:
//
//  1. Under the claim: nothing but its file is left there, or the folder stays.
//  2. The file of the claim is removed, and the claim released. Who waits for the claim then sees
//     that its file has no name (Storage::claim()).
//  3. The folder's directories are removed as far as they are empty. A save that has begun there
//     since keeps its own.
//
// Two processes that remove the same step: one has the claim, or its mark stands first.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/commit/whole_removal_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/engine/training_run/hints_internal.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/format/index.h"
#include "tilestone/format/manifest.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone {
namespace {

using engine::kLockName;

constexpr LogLevel kWarns = LogLevel::kWarning;

void log_kept(const std::string& name, Storage& run, const std::string& why,
              LogLevel level = kWarns) {
  log(level, fmt::format("{} in {} is not removed: {}", name, run.describe(), why));
}

bool is_directory(Storage& run, const std::string& name) {
  return contains_name(run.list_directories(name), name);
}

bool has_no_files_but_lock(Storage& folder) {
  const std::vector<std::string> names = folder.list();
  return std::all_of(names.begin(), names.end(),
                     [](const std::string& name) { return name == kLockName; });
}

// The removal of one step's folder.
class StepRemoval {
 public:
  StepRemoval(std::shared_ptr<Storage> run, std::string name)
      : run_(std::move(run)), name_(std::move(name)), folder_(run_->child(name_)) {}

  // `may_go`: asked under the lock, unless the removal has begun before.
  Removed run(const engine::MayGo& may_go) {
    const bool has_folders = run_->facts().has_folders;
    if (has_folders && !is_directory(*run_, name_)) return not_a_directory();
    bool begun = false, was_marked = false;
    try {
      if (const auto ended = acquire_lock()) return *ended;
      bool may = true;
      const auto mark = engine::begin_removal(
          *held_, lock_.get(), [&](Storage& folder, std::span<const std::string> names) {
            return may = !may_go || may_go(folder, names);
          });
      if (!may) return Removed::kNot;
      begun = mark != nullptr;
      was_marked = !begun;
      if (!engine::finish_removal(*held_, mark, lock_.get())) {
        log_kept(name_, *run_, "it was saved anew meanwhile");
        return Removed::kNot;
      }
      if (has_folders) remove_folder();
    } catch (const Error& error) {
      const bool is_gone = error.code() == ErrorCode::kNotFound;
      // What can't be removed is said once, not by each later pruning.
      if (!is_gone) log_kept(name_, *run_, error.what(), was_marked ? LogLevel::kDebug : kWarns);
      if (!begun && !is_gone) return Removed::kNot;
    }
    return begun ? Removed::kNow : Removed::kByOther;
  }

 private:
  Removed not_a_directory() {
    try {
      if (!run_->stat(name_)) return Removed::kByOther;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsafe) throw;
    }
    log_kept(name_, *run_, "it is a symbolic link");
    return Removed::kNot;
  }

  bool is_marked() const { return held_->stat(std::string(engine::kRemovedName)).has_value(); }

  // Nothing is made in a directory that another process has removed: it is held.
  std::optional<Removed> acquire_lock() {
    held_ = folder_->held();
    try {
      lock_ = engine::claim_location(*held_);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) throw;
      return std::nullopt;  // there are no locks here
    }
    if (!held_->stands()) return Removed::kByOther;
    if (lock_ != nullptr) return std::nullopt;
    if (is_marked()) return Removed::kByOther;
    log_kept(name_, *run_, "it is in use: a save, a repair or a removal is under way there");
    return Removed::kNot;
  }

  void remove_folder() {
    if (!has_no_files_but_lock(*held_)) return;
    engine::remove_claim(*held_, lock_);
    run_->tidy(name_);
    run_->settle("");
  }

  std::shared_ptr<Storage> run_;
  std::string name_;
  std::shared_ptr<Storage> folder_;
  std::shared_ptr<Storage> held_;
  std::unique_ptr<StorageClaim> lock_;
};

// Whether all files of saves there are of saves that began there. Then they are no checkpoint that
// was copied there without its hidden files. A save that was killed between its manifest and its
// index leaves what looks like a checkpoint that has lost its index; that may go once a newer step
// is durable.
bool all_began_here(Storage& folder) {
  const std::vector<std::string> names = folder.list();
  const engine::Notes notes = engine::read_notes(folder, names);
  return std::all_of(names.begin(), names.end(), [&](const std::string& name) {
    const auto own = engine::parse_tilestone_name(name);
    return !own || notes.begun.contains(own->save_id);
  });
}

// Whether a save that began there has ended before it removed what it had replaced.
bool has_note(Storage& folder) {
  const std::vector<std::string> names = folder.list();
  return std::ranges::any_of(
      names, [](const std::string& name) { return engine::kind_of(name) == engine::kNoteKind; });
}

// Whether the checkpoint in the folder is of this save. What its index names counts: a save that
// replaces it, and was killed, leaves the older manifest. Where the index can't be read, or names
// none, the manifests count.
bool is_still(Storage& folder, std::span<const std::string> names, const std::string& save_id) {
  // A save puts its manifest before its switch, so the only one is of what stands.
  std::vector<std::string> manifests(names.begin(), names.end());
  if (names.empty()) {
    manifests = folder.list_files(std::string(engine::kTilestoneDirectory) + "/");
  }
  std::erase_if(manifests, [](const std::string& name) {
    return engine::kind_of(name) != engine::kManifestKind;
  });
  if (may_have_manifest(save_id) && manifests == std::vector{manifest_name(save_id)}) return true;
  try {
    const std::string standing = engine::read_existing(folder, torch_dist_format()).save_id;
    if (may_have_manifest(standing)) {
      if (!save_id.empty()) return standing == save_id;
      return !folder.stat(manifest_name(standing));  // it was seen without its manifest
    }
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("which save's checkpoint is removed: ") + error.what());
  }
  StepInfo now;
  engine::read_lineage(folder, now);
  return now.save_id.empty() ||
         (may_have_manifest(save_id) && folder.stat(manifest_name(save_id)).has_value());
}

double seconds_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace

Removed RunDirectory::remove(const std::string& name,
                             const std::function<bool(Storage& folder)>& may_go) const {
  return remove_hinted(name, "", [&](Storage& folder, std::span<const std::string>) {
    return !may_go || may_go(folder);
  });
}

// Its hint goes just before the mark is put. "": it is not known whether there is one.
Removed RunDirectory::remove_hinted(const std::string& name, const std::string& hint,
                                    const MayRemove& may_go) const {
  const auto may = [&](Storage& folder, std::span<const std::string> names) {
    if (!may_go(folder, names)) return false;
    Storage& run = location_.storage();
    std::vector<std::string> hints{hint};
    if (hint.empty()) hints = engine::hints_of(run, name);
    if (!hints.empty()) run.remove(hints);
    return true;
  };
  return StepRemoval(location_.shared(), name).run(may);
}

// Whether the removal of the step has begun, and not ended.
bool RunDirectory::is_removed(const std::string& name) const {
  return at(name).storage().stat(std::string(engine::kRemovedName)).has_value();
}

// A save that begins there meanwhile holds the lock, or has found the folder gone and fails.
void RunDirectory::remove_unfinished(const std::string& name) const {
  const Location step = at(name);
  if (!step.storage().list().empty()) {
    tilestone::remove_leftovers(step, all_began_here(step.storage()));
  }
  if (!has_no_files_but_lock(step.storage())) return;
  remove(name, has_no_files_but_lock);
}

void RunDirectory::remove_replaced(const std::string& name) const {
  or_log(kWarns,
         "files that the checkpoint " + name + " does not need stay in " + location_.describe(),
         [&] {
           const Location step = at(name);
           if (has_note(step.storage())) tilestone::remove_leftovers(step);
         });
}

void RunDirectory::end_removals() const { end_removals(contents()); }

void RunDirectory::end_removals(const Contents& here) const {
  for (const StepInfo& listed : here.steps) {
    if (listed.state == StepState::kDurable || listed.is_link) continue;
    or_log(kWarns, "a removed folder of " + listed.name + " in " + location_.describe() + " stays",
           [&] {
             const auto never = [](Storage&) { return false; };  // not what was saved there since
             if (is_removed(listed.name)) remove(listed.name, never);
           });
  }
  for (const std::string& name : here.hidden) {
    or_log(kWarns, "a removed folder of " + name + " in " + location_.describe() + " stays", [&] {
      const auto folder = location_.storage().child(name);
      const engine::Siblings siblings(*folder);
      for (const engine::Sibling& sibling : siblings.find()) siblings.remove_dead(sibling);
    });
  }
}

void RunDirectory::remove_remains(uint64_t below) const { remove_remains(contents(), below); }

void RunDirectory::remove_remains(const Contents& here, uint64_t below) const {
  end_removals(here);
  const std::string where = " in " + location_.describe() + " stays";
  for (const StepInfo& listed : here.steps) {
    if (listed.step >= below || listed.is_link || listed.state == StepState::kDurable) continue;
    or_log(kWarns, "the unfinished " + listed.name + where, [&] {
      if (!engine::may_be_checkpoint(at(listed.name).storage())) remove_unfinished(listed.name);
    });
  }
}

// Says also in `here` which steps are durable. What is only believed is not known.
std::vector<StepInfo> RunDirectory::durable_steps(Contents& here, Known& known) const {
  std::vector<StepInfo> durable;
  Known still;
  for (StepInfo& listed : here.steps) {
    const auto found = known.find(listed.name);
    if (listed.hint.empty() && found != known.end()) {
      engine::read_lineage(at(listed.name).storage(), listed);
    }
    // A step may have been saved anew. Another program's checkpoint has no manifest.
    const bool is_known =
        found != known.end() && (listed.save_id.empty() || listed.save_id == found->second.save_id);
    StepInfo info = is_known ? found->second : engine::look_or_believe(*this, listed).info;
    listed.state = info.state;
    if (info.state != StepState::kDurable) continue;
    const bool is_believed = info.hint == listed.hint && !listed.hint.empty();
    info.hint = listed.hint;
    if (is_known || !is_believed || !location_.storage().facts().costs_requests) {
      still.emplace(info.name, info);
    }
    durable.push_back(std::move(info));
  }
  known = std::move(still);
  return durable;
}

// Those that go. Before any does, those that stay as the last ones of the line are looked at: a
// hint is not enough to rely on them, nor is an earlier look. `newest` has just been looked at.
std::vector<const StepInfo*> RunDirectory::superseded(std::vector<StepInfo>& durable,
                                                      const std::string& newest, const Keep& keep,
                                                      Known& known) const {
  std::set<std::string> seen{newest};
  for (;;) {
    const auto tip = std::ranges::find(durable, newest, &StepInfo::name);
    if (tip == durable.end()) return {};  // it was removed meanwhile
    auto goes = steps_to_prune(durable, *tip, keep, seconds_now());
    Line line = line_of(durable, *tip);
    line.resize(std::min(line.size(), keep.last));
    const auto unseen = std::ranges::find_if(
        line, [&](const StepInfo* each) { return !seen.contains(each->name); });
    if (goes.empty() || unseen == line.end()) return goes;
    const auto at = durable.begin() + (*unseen - durable.data());
    seen.insert(at->name);
    const auto before = known.find(at->name);
    const auto storage = this->at(at->name).shared();
    if (before != known.end() && engine::has_files_of(*storage, before->second)) continue;
    StepInfo info = look(*at);
    if (info.state == StepState::kDurable) {
      info.hint = at->hint;
      known.insert_or_assign(info.name, info);
      *at = std::move(info);
    } else {
      known.erase(at->name);
      durable.erase(at);
    }
  }
}

void RunDirectory::note(uint64_t saved) const {
  or_log(LogLevel::kDebug, fmt::format("step {} gets no hint", saved), [&] {
    Contents here = contents();
    noted(saved, here);  // fails after a save that has failed
  });
}

// What the step that was saved is, which must be durable. Leaves its hint, and removes idle ones.
StepInfo RunDirectory::noted(uint64_t saved, Contents& here) const {
  StepInfo info;
  StepInfo* listed = nullptr;
  for (StepInfo& each : here.steps) {
    if (each.step == saved) listed = &each;
  }
  if (listed != nullptr) info = look(*listed);
  if (info.state != StepState::kDurable) {
    throw Error(ErrorCode::kNotFound,
                fmt::format("step {} is not durable ({})", saved,
                            listed != nullptr ? info.problem : std::string("it has no folder")));
  }
  or_log(kWarns, "hints of steps in " + location_.describe() + " are missing", [&] {
    Storage& run = location_.storage();
    const std::string hint = info.is_link ? "" : engine::hint_name(run, info);
    if (!listed->hint.empty() && listed->hint != hint) here.idle.push_back(listed->hint);
    if (!here.idle.empty()) run.remove(here.idle);
    if (!hint.empty() && listed->hint != hint) engine::put_hint(run, info, hint);
    info.hint = hint;
  });
  listed->hint = info.hint;
  listed->save_id = info.save_id;
  return info;
}

Removed RunDirectory::remove(const StepInfo& seen) const {
  const auto may = [&](Storage& folder, std::span<const std::string> names) {
    const bool is_same = is_still(folder, names, seen.save_id);
    if (!is_same) log_kept(seen.name, location_.storage(), "it was saved anew meanwhile");
    return is_same;
  };
  return remove_hinted(seen.name, seen.hint, may);
}

std::vector<uint64_t> RunDirectory::prune(uint64_t saved, const Keep& keep,
                                          std::map<std::string, StepInfo>& known) const {
  std::vector<uint64_t> removed;
  or_log(kWarns, "older steps in " + location_.describe() + " stay", [&] {
    check_keep(keep);
    Contents here = contents();
    const StepInfo newest = noted(saved, here);
    known.insert_or_assign(newest.name, newest);
    // Another process may have saved it, and died before its last sync.
    at(newest.name).storage().settle("");
    location_.storage().settle("");
    const Known before = known;
    std::vector<StepInfo> durable = durable_steps(here, known);
    const auto goes = superseded(durable, newest.name, keep, known);
    for (const StepInfo& info : durable) {
      if (std::ranges::find(goes, &info) != goes.end()) {
        if (remove(info) == Removed::kNow) removed.push_back(info.step);
      } else if (known.contains(info.name) && !before.contains(info.name) && !info.is_link) {
        remove_replaced(info.name);
      }
    }
    remove_remains(here, saved);
  });
  return removed;
}

std::vector<Leftover> RunDirectory::leftovers(bool remove, bool force) const {
  const Contents here = contents();
  std::set<std::string> names = here.hidden;
  for (const StepInfo& listed : here.steps) names.insert(listed.name);
  const uint64_t newest = latest().value_or(0);
  std::vector<Leftover> found;
  for (const std::string& name : names) {
    or_log(kWarns, "the leftovers of " + name + " are not known", [&] {
      const Location step = at(name);
      if (step.storage().list().empty() && !here.hidden.contains(name)) return;
      const bool removed = is_removed(name);
      const bool superseded = names_.step_of(name) < newest;
      const bool all = force || (superseded && all_began_here(step.storage()));
      for (Leftover& file :
           remove ? tilestone::remove_leftovers(step, all) : tilestone::find_leftovers(step, all)) {
        file.name = file.name.starts_with("../") ? file.name.substr(3) : name + "/" + file.name;
        found.push_back(std::move(file));
      }
      if (remove && removed) this->remove(name, has_no_files_but_lock);
    });
  }
  return found;
}

std::vector<Leftover> RunDirectory::find_leftovers(bool force) const {
  return leftovers(false, force);
}

std::vector<Leftover> RunDirectory::remove_leftovers(bool force) const {
  return leftovers(true, force);
}

}  // namespace tilestone
