// The commit protocol. Saves in a sibling have their own: see sibling.cc.
//
// The names of a save's data files, manifest and temporary files contain its save id, a random
// UUID: no two saves use the same. Only the index has fixed names. One file of it, the switch,
// names the save and its data files, and alone decides which checkpoint a location has.
//
//  1. Claim. The coordinator takes the lock, or in an object store a lease (storage/lease.cc), if
//     the place has either. Who has lost a lease removes nothing of others, and does not try the
//     switch. Each try ends before the lease can lapse.
//  2. Settle and look. The place is settled: an earlier switch may not be durable. One look
//     (look_at()) decides everything: whether the save may begin, what it replaces, and what failed
//     saves have left, which goes under the lock. The switch's tag is taken before it is read.
//  3. Note. A file (note_name) says that this save has begun here and which saves' checkpoint it
//     will replace. It is durable before step 4.
//  4. Upload. Each rank writes its data files, syncs them and their directory, and reports.
//  5. Prepare. The coordinator opens each reported file, which finds a rank that wrote elsewhere,
//     merges the receipts, which checks coverage, writes the switch to a temporary file and syncs
//     it, which shows lack of space, and publishes the manifest. Files of the index that come
//     before the switch have new names; they are written and synced.
//  6. Switch. The bytes are put as the switch (Storage::put_prepared()): if absent, where none
//     stood at the look; else if it still has the tag that was taken. Where there are no tags, the
//     lock has kept others away. The put is the commit, and durable when it answers.
//  7. Clean. Files of the replaced checkpoint and leftovers are removed. Once that is durable, so
//     is the note, and with it, where nothing was renamed, the temporary file.
//
// What may be removed: files of a save that began here according to a note, unless the switch names
// them; and files of a save that the current one has replaced, according to its note. Any other
// file with such a name was copied here, and may be somebody's only copy.
//
// Who else is at work. Of two saves the lock or the condition of step 6 refuses one, which says who
// was first. Only two replacements without locks and tags are not kept apart, which a warning says.
// A save without a communicator takes no lock, but looks for it once its head exists, as this one
// looks for heads once it has the lock: one sees the other (attempt.cc). Without locks leftovers
// stay, and step 5 ends with another look.
//
// A crash before step 6: the switch, if there is one, is the old one. No file that it names was
// touched, because new files have new names: leftovers, which the note covers. A manifest beside
// the switch's temporary file is of a save that was not published; without it, of a checkpoint that
// has lost its index. At the put: the old or the new switch is there, and what either names is
// complete: 5 is over, and 7 has not begun. After step 6: the old switch can't come back when its
// files go; what stays is covered by the note.
//
// A put without an answer may have made the switch, now or later. Until an answer is definite
// nobody removes anything of this save, old or new. The switch is put again, with a new temporary
// file if the first is gone. It is done; or refused: what stands is read, this save's, which is put
// once more so that it is durable, or another's: the save has failed. If no try succeeds, the error
// says that it is not known whether the checkpoint exists; step 2 of the next save or gc decides.
//
// Fixed names where there are no directories. Files of the index (replaces_one_by_one()) are put
// before the switch, if absent, into an empty place. Over a checkpoint of the same dialect the
// format's file, which names the save, is the switch, and the dialect's follow it; step 5 puts
// copies of these under the save's own names, which readers take where the standing file is not the
// one that the manifest describes. After a crash the next save or gc puts them (finish_index()).
// zarr's data files have them if one process writes all, into an empty place. It notes them after
// step 3, and puts each if absent: a file of another program ends the save. While no switch stands,
// who comes next removes what has these names, also what another program has put there since a
// crash; who has lost his claim removes none: they may be another save's.
//
// A save that fails before step 6, when no rank writes any more and its data files are gone,
// removes its note, then the directories that it made. A removed file is no lock.
#include "tilestone/engine/commit/transaction_internal.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/base/pause.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/commit/whole_removal_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/write/new_files_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/version.h"

namespace tilestone::engine {
namespace {

constexpr std::chrono::seconds kOthersRemove{1};  // their files, after a failure
constexpr int kSwitchTries = 3;
constexpr std::chrono::duration<double> kBetweenSwitchTries{0.01};  // five times longer each time

bool holds_files(Storage& storage, const std::string& save_id) {
  return std::ranges::any_of(storage.list(), [&](const std::string& name) {
    const auto own = parse_tilestone_name(name);
    const bool is_of_rank = own && (own->kind == kDataKind || own->kind == kTemporaryKind);
    return is_of_rank && own->save_id == save_id;
  });
}

// Whether the file stands as this save made it.
bool stands(Storage& storage, const IndexFile& file) {
  const auto info = storage.stat(file.name);
  return info && info->size == file.bytes.size() &&
         read_file(storage, file.name, kAnySize) == file.bytes;
}

// The error of a save whose switch was refused. Says whose checkpoint stands there, if it can be
// read.
Error not_first(Storage& storage, const std::string& file,
                const std::shared_ptr<const Format>& format) {
  std::string other = "another save";
  try {
    const ExistingCheckpoint existing = read_existing(storage, format);
    if (!existing.found) {
      return Error(ErrorCode::kNotFound, "the checkpoint at " + storage.describe() +
                                             " was removed since this save began to replace it")
          .with_file(file)
          .with_hint("save it once more");
    }
    if (!existing.save_id.empty()) other = "the save " + existing.save_id;
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("which save was first: ") + error.what());
  }
  return Error(ErrorCode::kAlreadyExists,
               other + " has published a checkpoint at " + storage.describe() +
                   " since this one began, so this one changes nothing there")
      .with_file(file)
      .with_reason(Reason::kCheckpointExists)
      .with_hint("save one at a time, or each to a place of its own");
}

// False where that can't be known.
bool is_of_another(Storage& storage, const IndexFile& file) {
  try {
    return !stands(storage, file);
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

Transaction::Transaction(std::shared_ptr<Storage> storage, std::shared_ptr<const Format> format,
                         std::shared_ptr<const Dialect> dialect, std::string save_id,
                         bool overwrite, const std::string& separation_hint, bool one_writer)
    : terms_{std::move(format), std::move(dialect), std::move(save_id), overwrite, one_writer},
      location_(std::move(storage)),
      storage_(location_) {
  if (!separation_hint.empty()) old_.saves.insert(separation_hint + terms_.save_id);
}

// Nothing is made at a location that the first look refuses.
void Transaction::begin(Deadline deadline) {
  const Standing before = look([&] { end_removal(*location_, deadline); });
  const bool in_sibling = needs_sibling(*location_, before, terms_);
  expect_directories(*location_, terms_, !in_sibling);
  if (in_sibling) return begin_in_sibling(before);
  const bool is_fresh = std::ranges::none_of(before.names, in_tilestone_directory);
  begin_in_place(is_fresh, deadline);
}

// A file may be lost while another save replaces the location. `end_removal`: called if a removal
// has begun there; then the look is a new one.
Standing Transaction::look(const std::function<void()>& end_removal) const {
  constexpr int kMaxTries = 8;
  bool ends_one = end_removal != nullptr;
  for (int tries = 1;; ++tries) {
    try {
      Standing here = look_at(*location_, terms_.format);
      if (here.is_removed && std::exchange(ends_one, false)) {
        end_removal();
        continue;
      }
      expect_free(*location_, here, terms_);
      return here;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound || tries == kMaxTries) throw;
    }
  }
}

// Refuses before the location is locked, because the lock's file would stay there. If another save
// changes the location meanwhile, only the look under the lock counts. Each save of ours changes
// the names there.
void Transaction::begin_in_sibling(const Standing& before) {
  const Dialect* const remains_of = terms_.overwrite ? terms_.dialect.get() : nullptr;
  try {
    expect_only_checkpoint(*location_, before, remains_of);
  } catch (const Error&) {
    if (!is_saved_to(*location_) && before.names == location_->list()) throw;
  }
  sibling_.emplace(location_, terms_.save_id);
  sibling_->begin();
  expect_only_checkpoint(*location_, look(), remains_of);
  storage_ = sibling_->storage();
}

void Transaction::begin_in_place(bool is_fresh, Deadline deadline) {
  clean_siblings(*location_);
  expect_no_directory_of_index(*location_, *terms_.format);
  claim_.take(*location_, is_fresh, deadline);
  Standing here = look();
  if (needs_sibling(*location_, here, terms_)) fail_under_way(*location_);
  location_->settle("");
  finish_replacement(*location_, *terms_.format, here);
  old_.one_by_one = replaces_one_by_one(*location_, here, terms_);
  if (old_.one_by_one) finish_index(*location_, here, read_existing(*location_, here).save_id);
  take_tags(*location_, here, old_);
  const std::vector<std::string> found = take_stock(*location_, here, terms_, old_);
  if (claim_.is_held()) {
    try {
      remove_remains(*location_, here.remains);
    } catch (const Error& error) {  // with their fixed names they would join the new checkpoint
      throw Error(error).with_hint(
          "a killed save has left this file: remove it if the next save fails too");
    }
    or_log(LogLevel::kWarning, "leftovers of earlier saves stay", [&] {
      remove_leftover_files(*location_, found);
      old_.own = without(std::move(old_.own), found);
      // Those of saves that were killed: each has left its note before it wrote.
      const auto is_dead = [&](const std::string& name) {
        const auto own = parse_tilestone_name(name);
        const bool began_here =
            own ? here.notes.begun.contains(own->save_id) : here.notes.fixed_names.contains(name);
        return began_here && claim_.is_held();
      };
      if (!here.notes.begun.empty()) location_->discard_unfinished("", is_dead);
    });
  }
  leave_note(*location_, terms_.save_id, old_.saves, deadline);
  stage_ = Stage::kBegun;
  forget_missing_tags(*location_, old_);
}

void Transaction::note_files(const std::set<std::string>& names, Deadline deadline) {
  if (sibling_) return;
  if (!claim_.is_held() && !claim_.is_lost()) {
    throw Error(ErrorCode::kUnsupported,
                "files without a save id in their names can't be written to " +
                    location_->describe() + ", which can't be claimed");
  }
  has_named_files_ = true;
  leave_fixed_names(*location_, terms_.save_id, names, claim_.while_held(*location_, deadline));
}

void Transaction::prepare(ToPublish given, Deadline deadline) {
  expect_files(*storage_, given.save.receipts, given.threads, deadline);
  given.save.save_id = terms_.save_id;
  given.save.writer = writer_name();
  given.save.inventory = given.step != nullptr;
  given.save.dialect_follows = old_.one_by_one;
  new_ = describe_save(std::move(given.save), *terms_.format, *terms_.dialect);
  if (given.step != nullptr) compare_with_before(*given.step, new_.inventory);
  step_ = std::move(given.step);
  prepare_index(given.manifest, given.threads, deadline);
}

void Transaction::prepare_made(NewIndex made, const std::set<std::string>& dialects,
                               std::span<const Receipt> receipts, int threads, Deadline deadline) {
  expect_files(*storage_, receipts, threads, deadline);
  new_ = std::move(made);
  for (IndexFile& file : new_.index) {
    if (old_.one_by_one && dialects.contains(file.name)) file.role = IndexRole::kAfter;
  }
  prepare_index(!new_.manifest.empty(), threads, deadline);
}

// new_ is what is published, of which the switch comes last.
void Transaction::prepare_index(bool manifest, int threads, Deadline deadline) {
  if (!sibling_) {
    const IndexFile& file = switch_file(new_.index);
    storage_->prepare_put(temporary_of(file), file.bytes, deadline);
  }
  if (manifest) {
    const std::string name = manifest_name(terms_.save_id);
    new_.files.insert(name);
    storage_->publish(name, temporary_name(terms_.save_id, "manifest"), new_.manifest, false,
                      deadline);
  }
  for (const IndexFile& file : files_that_follow()) {
    storage_->publish(temporary_of(file), temporary_name(terms_.save_id, "copy"), file.bytes, false,
                      deadline);
  }
  if (!old_.rank_local.empty()) {
    mark_replaced(*location_, terms_.save_id, old_.rank_local, deadline);
  }
  // This look precedes publish_before(), whose files may themselves look like a checkpoint.
  if (!sibling_ && !claim_.is_held()) look();
  if (has_named_files_) deadline = claim_.while_held(*location_, deadline);
  publish_before(threads, deadline);
  if (!sibling_) return;
  publish(IndexRole::kSwitch, deadline);
  publish(IndexRole::kAfter, deadline);
  look();  // an empty location is not locked
}

void Transaction::commit(Deadline deadline) {
  if (sibling_) {
    stage_ = Stage::kTried;
    sibling_->publish();
  } else {
    put_switch(deadline);
  }
  if (step_ != nullptr) {
    step_->now = std::move(new_.inventory);
    step_->save_id = terms_.save_id;
  }
  if (!sibling_) publish(IndexRole::kAfter, deadline);
}

// Of which copies are put before the switch.
std::vector<IndexFile> Transaction::files_that_follow() const {
  std::vector<IndexFile> files;
  std::ranges::copy_if(new_.index, std::back_inserter(files), [&](const IndexFile& file) {
    return old_.one_by_one && file.role == IndexRole::kAfter;
  });
  return files;
}

std::string Transaction::temporary_of(const IndexFile& file) const {
  return engine::temporary_of(terms_.save_id, file.name);
}

// Once more after a failure. A further try never takes a file that an earlier one may have left
// half written.
bool Transaction::put_switch_again(int tries, Deadline deadline) {
  const IndexFile& file = switch_file(new_.index);
  std::string scratch = temporary_of(file);
  if (!storage_->stat(scratch)) {
    scratch = engine::temporary_of(terms_.save_id, file.name + "-" + std::to_string(tries));
    storage_->prepare_put(scratch, file.bytes, deadline);
  }
  const auto info = storage_->stat(file.name);
  if (!info || !stands(*storage_, file)) {
    return storage_->put_prepared(file.name, file.bytes, condition_of(old_, terms_, file.name),
                                  scratch, deadline);
  }
  const Condition own = info->tag.empty() ? Condition::always() : Condition::has(info->tag);
  return storage_->put_prepared(file.name, file.bytes, own, scratch, deadline);
}

void Transaction::put_switch(Deadline deadline) {
  const IndexFile& file = switch_file(new_.index);
  if (deadline.expired()) {
    throw Error(ErrorCode::kTimeout, "the deadline passed before the checkpoint was published")
        .with_file(file.name);
  }
  Deadline limit = claim_.while_held(*storage_, deadline);
  stage_ = Stage::kTried;
  std::optional<Error> first;  // failure
  auto wait = kBetweenSwitchTries;
  for (int tries = 1; tries <= kSwitchTries; ++tries) {
    if (first) pause(std::exchange(wait, 5 * wait), deadline);
    bool done = false;
    try {
      if (first) limit = claim_.while_held(*storage_, deadline);
      done = first ? put_switch_again(tries, limit)
                   : storage_->put_prepared(file.name, file.bytes,
                                            condition_of(old_, terms_, file.name),
                                            temporary_of(file), limit);
    } catch (const Error& error) {
      if (!first) first = error;
      continue;
    }
    if (done) return expect_own_files();
    Error refused = not_first(*storage_, file.name, terms_.format);
    if (is_of_another(*storage_, file)) {
      stage_ = Stage::kBegun;
      throw Error(refused);
    }
    if (!first) first = std::move(refused);  // the request was executed twice, or can't be read
  }
  throw Error(*first).with_hint("it is not known whether the checkpoint exists: it does if " +
                                file.name + " names the save " + terms_.save_id +
                                "; the next save or gc there removes what is not needed");
}

// Where the put has returned only after the claim was lost, a save that has begun meanwhile may
// have taken this one for dead, and removed its files. Then those of the replaced checkpoint stay.
void Transaction::expect_own_files() {
  if (!claim_.is_lost()) return;
  for (const std::string& name : new_.files) {
    if (storage_->stat(name)) continue;
    throw Error(ErrorCode::kCorrupt,
                "the save " + terms_.save_id + " lost its claim on " + storage_->describe() +
                    " while it published its checkpoint, and another process has removed its files")
        .with_file(name)
        .with_hint("save once more");
  }
}

// No existing file has these names: they contain this save's id, or are in its own directory.
void Transaction::publish_before(int threads, Deadline deadline) {
  std::vector<NewFile> files;
  for (const IndexFile& file : new_.index) {
    if (file.role == IndexRole::kBefore) files.push_back({&file.name, file.bytes});
  }
  write_new_files(*storage_, files, threads, deadline,
                  [&](const std::string& name) { published_.push_back(name); });
}

void Transaction::publish(IndexRole role, Deadline deadline) {
  for (const IndexFile& file : new_.index) {
    if (file.role != role) continue;
    published_.push_back(file.name);  // whatever the answer is, unless it is refused
    if (storage_->put(file.name, file.bytes, condition_of(old_, terms_, file.name),
                      temporary_of(file), deadline)) {
      continue;
    }
    published_.pop_back();
    throw not_first(*storage_, file.name, terms_.format);
  }
}

void Transaction::clean() {
  if (sibling_) return sibling_->clean();
  or_log(LogLevel::kWarning, "files of the replaced checkpoint stay", [&] { clean_in_place(); });
}

// If some files stay, the note stays too.
void Transaction::clean_in_place() {
  if (!old_.rank_local.empty()) remove_rank_local(*location_, old_.rank_local);
  std::vector<std::string> gone =
      files_to_remove(old_, terms_, new_.files, switch_file(new_.index).name, claim_.is_held());
  gone.push_back(note_name(terms_.save_id));
  if (has_named_files_) gone.push_back(fixed_names_of(terms_.save_id));
  for (const IndexFile& file : files_that_follow()) gone.push_back(temporary_of(file));
  if (!location_->facts().renames) gone.push_back(temporary_of(switch_file(new_.index)));
  remove_leftover_files(*location_, gone);
  if (claim_.is_held()) remove_directories_of_replaced(*location_, old_);
}

void Transaction::discard(std::span<const std::string> files) {
  if (files.empty() || (has_named_files_ && !claim_.is_held())) return;
  are_files_left_ |= !remove_files(*storage_, files);
}

void Transaction::abandon(bool none_writes) {
  if (sibling_) return sibling_->abandon();
  if (has_named_files_ && !claim_.is_held()) return;
  // These files describe a checkpoint that has no switch and whose data files will be removed.
  if (claim_.is_held() || published_is_ours()) discard(published_);
  const std::string manifest = manifest_name(terms_.save_id);
  // The temporary file shows of a manifest that its save was not published.
  const auto remove = [&](const std::string& file) { return remove_files(*storage_, {&file, 1}); };
  const bool has_none = !new_.files.contains(manifest) || remove(manifest);
  if (has_none && !new_.index.empty()) remove(temporary_of(switch_file(new_.index)));
  for (const IndexFile& file : files_that_follow()) remove(temporary_of(file));
  if (has_named_files_ && !are_files_left_) remove(fixed_names_of(terms_.save_id));
  // Before its note is left, no rank has written.
  if (stage_ != Stage::kNew && (!none_writes || !remove_note())) return;
  claim_.give_up(*location_);
}

// Another save may have been first with files of these names, and an answer may have been lost. The
// file that names this save was put first, and keeps others from publishing while it stands.
bool Transaction::published_is_ours() const {
  return std::ranges::any_of(new_.index, [&](const IndexFile& file) {
    const bool names_save = as_text(file.bytes).find(terms_.save_id) != std::string_view::npos;
    return names_save && std::ranges::count(published_, file.name) > 0 &&
           !is_of_another(*storage_, file);
  });
}

// False: the note stays, for data files that could not be removed.
bool Transaction::remove_note() {
  if (are_files_left_) return false;
  try {
    const Deadline patience = Deadline::after(kOthersRemove);
    std::chrono::duration<double> wait{0.01};
    for (; holds_files(*storage_, terms_.save_id); wait *= 2) {
      if (patience.expired()) return false;
      pause(wait, patience);
    }
    return remove_files(*storage_, std::vector{note_name(terms_.save_id)});
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("the note of a failed save stays: ") + error.what());
    return false;
  }
}

}  // namespace tilestone::engine
