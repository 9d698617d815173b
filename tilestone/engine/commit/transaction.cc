// The commit protocol.
//
// Names. The names of a save's data files, manifest and temporary files contain its save id, a
// random UUID, so no two saves ever use the same name. The format's metadata file has a fixed name
// and contains the save id and the names of the data files. It alone decides which checkpoint a
// location has.
//
//  1. The coordinator makes the directories, takes the lock, and refuses or accepts what the
//     location contains. It removes what failed saves have left. (Where the storage has no locks,
//     leftovers stay, here and in step 5: they may belong to a running save.) It leaves a
//     note (note_name) that this save has begun here and which saves' checkpoint it will replace.
//     The note is durable before step 2.
//  2. Each rank writes its data files, syncs them, syncs their directory, and reports.
//  3. The coordinator opens each file that a rank reported, so that a rank that wrote to another
//     directory is found. It merges the receipts, which checks coverage. It writes the metadata to
//     a temporary file and syncs it, so lack of space shows here. Later a manifest that has neither
//     this file nor the metadata is that of a checkpoint that has lost its metadata. It publishes
//     the manifest: written to a temporary file, synced, renamed, directory synced. Files of the
//     index that come before the switch have new names and mean nothing without it. They are
//     written under their final names, many at a time, and synced, and then their directories are
//     (new_files.cc). Then the coordinator checks once more for what step 1 refuses, because a save
//     without a communicator takes no lock.
//  4. The coordinator renames the metadata file to its name, and syncs the directory. The rename is
//     the commit.
//  5. The coordinator removes the files of the replaced checkpoint, and leftovers. Once they are
//     durably removed, it removes the note.
//
// What may be removed: files of a save that began here according to a note, unless the metadata
// names them; and files of a save that the current one has replaced, according to its note. Any
// other file with such a name has been copied here and may be somebody's only copy: no save removes
// it.
//
// A crash at any point:
//  - Before the rename of step 4: the metadata file, if there is one, is the old one. No file that
//    it names has been touched, because all new files have new names. Without an old metadata file
//    there is no checkpoint. The new files are leftovers: the next save recognizes them by the note
//    and because the metadata does not name them.
//  - At the rename: the file system shows the old or the new metadata. Both are complete (the new
//    one was synced before the rename), and so are all files that either names: steps 2 and 3 are
//    over, and step 5 has not begun.
//  - After step 4: the directory has been synced, so the old metadata can't come back when step 5
//    removes the files that it named. Files that step 5 does not reach are leftovers that the note
//    covers.
//
// A save that fails before step 4 when no rank writes any more, and whose data files are gone,
// removes its note too, and then the directories that it made: the location's, or its
// kTilestoneDirectory, which holds the lock, and empty ones above the location. Nobody who waits
// for the lock takes a removed file for it (try_lock_location()).
//
// If the rename or the sync after it fails, nobody can know which metadata will be there after a
// reboot. Then no rank removes anything, neither new files nor old ones. If the rename has not
// happened, the temporary file of the metadata shows that the save was not published. A save
// without `overwrite` takes its metadata back, so that it can be repeated: the name was free, and
// all that the metadata names stays.
//
// Step 1 of a later save reads the metadata to know what may be removed. A crash between the rename
// and the directory sync of an earlier step 4 could undo that rename. Therefore step 1 syncs the
// directory before it removes anything.
//
// A rank-local checkpoint has one metadata file per rank instead of a common one. If a directory
// has both kinds, a reader can't tell which is valid, and one rename can't switch them. Therefore,
// before step 4, a small file (kReplacedName) states that the save with this id replaces rank-local
// files of these names and contents. A reader that finds both kinds uses the common metadata file
// if and only if it has that id and every rank-local file is listed. Step 5 removes the rank-local
// files first, then kReplacedName. If step 5 was interrupted, step 1 of a later save does so.
//
// Staged saves (staging.cc). Files of some formats and dialects have names that contain no save id:
// zarr's files, Megatron-Core's common.pt and metadata.json. If the new checkpoint or the existing
// one has such files, one rename can't switch them, and a stock reader would mix the files of two
// saves. Such a save makes a directory of its own beside the location, ".NAME.tilestone-SAVE_ID",
// and all its ranks write there. Symbolic links are resolved first: NAME is the name of the
// directory itself.
//
//  1. The coordinator removes what dead saves have left beside the location, and refuses if a save
//     there is alive. It makes its directory and locks it (kLockName within), looks for live saves
//     once more, and locks the location unless that is empty. Since the whole location will be
//     removed, it refuses unless every file there belongs to a checkpoint or to a dead save. (With
//     overwrite, files of an unfinished save of stock Megatron-Core are accepted too:
//     expect_only_checkpoint().) The ranks get the directory's name with their orders.
//  2. As above, in the directory.
//  3. As above, and the whole index is written in the directory: before, at and after the switch.
//     Then the location is checked once more, as above.
//  4. The commit. If the location is absent or empty, the directory is renamed to it, which fails
//     if anything is there by then. Otherwise the two directories are exchanged in one step. Then
//     the parent directory is synced.
//  5. The replaced checkpoint, which now has the directory's name, is removed: the files that
//     describe it first.
//
// A crash at any point:
//  - Before step 4: the location has not been touched except for kLockName. The directory is a
//    leftover: its name contains NAME and a save id, and nobody holds its lock, which is released
//    when its save dies.
//  - At step 4: rename and exchange are one step of the file system, so both names have either
//    their old meaning or their new one. Both trees are complete and durable: steps 2 and 3 are
//    over, and step 5 has not begun.
//  - After step 4: the exchange is durable before step 5 removes anything. What step 5 does not
//    reach is a leftover under the directory's name.
//
// A process that removes a leftover directory takes its lock and syncs the parent first. Otherwise
// a crash could undo an exchange that is not yet durable, after files of the old tree were removed.
//
// Locks. A directory keeps its lock when it is renamed or exchanged, so a process that comes to the
// location during step 5 finds it locked. A lock file that was opened before an exchange and locked
// after it belongs to the old tree; try_lock_location() detects that. Two first saves to one
// location exclude each other by steps 1 and 4.
//
// Readers hold the directory open (Storage::held). If it is replaced meanwhile, they continue to
// see the old one until its files are removed. The files that describe it are removed first, so a
// reader that has them gets an error for each file that is gone. A reader that finds only some of
// them does not believe what it finds, because the directory no longer stands (find_checkpoint()).
//
// Shared directories (megatron_shards_dialect()). There Megatron-Core itself replaces common.pt
// before a save of the sharded part begins, and writes metadata.json after it has ended. So nothing
// of ours could switch the whole checkpoint, and steps 1 to 5 are those of a save in place:
// common.pt and files that the replaced .metadata does not name stay. The caller removes an older
// metadata.json first. From then until Megatron-Core's own save has ended, Megatron-Core's readers
// do not accept the directory as a checkpoint. Our readers do not accept it either once the new
// .metadata exists, because the manifest names the dialect (check_dialect() in open/opening.cc).
#include "tilestone/engine/commit/transaction_internal.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/engine/write/new_files_internal.h"
#include "tilestone/format/foreign.h"
#include "tilestone/format/manifest.h"
#include "tilestone/version.h"

namespace tilestone::engine {
namespace {

bool in_tilestone_directory(const std::string& name) {
  return name.starts_with(std::string(kTilestoneDirectory) + "/");
}

// "metadata" for ".metadata", "zarray" for "a/b/.zarray". Different files may share a result, since
// only one temporary file of them exists at a time. None is called like the manifest's or
// kReplacedName's, which exist beside the switch's.
std::string base_name(const std::string& name) {
  const std::string last = name.substr(name.rfind('/') + 1);
  return last.substr(std::min(last.find_first_not_of('.'), last.size()));
}

constexpr std::chrono::seconds kOthersRemove{1};  // their files, after a failure

bool holds_files(Storage& storage, const std::string& save_id) {
  return std::ranges::any_of(storage.list(), [&](const std::string& name) {
    const auto own = parse_tilestone_name(name);
    const bool is_of_rank = own && (own->kind == kDataKind || own->kind == kTemporaryKind);
    return is_of_rank && own->save_id == save_id;
  });
}

bool has_fixed_names(const Format& format, const Dialect& dialect) {
  return format.has_fixed_names() || dialect.has_fixed_names();
}

// Who removes a directory holds its lock only until it has removed the lock's file.
bool is_being_removed(Storage& storage, const Deadline& deadline) {
  constexpr int kLooks = 5;
  for (int look = 0; look < kLooks; ++look) {
    if (!storage.stat(std::string(kLockName))) return true;
    pause(std::chrono::duration<double>(0.02), deadline);
  }
  return false;
}

}  // namespace

Transaction::Transaction(std::shared_ptr<Storage> storage, std::shared_ptr<const Format> format,
                         std::shared_ptr<const Dialect> dialect, std::string save_id,
                         bool overwrite, const std::string& separation_hint)
    : location_(std::move(storage)),
      storage_(location_),
      format_(std::move(format)),
      dialect_(std::move(dialect)),
      save_id_(std::move(save_id)),
      overwrite_(overwrite) {
  if (!separation_hint.empty()) noted_.insert(separation_hint + save_id_);
}

void Transaction::begin(Deadline deadline) {
  refuse_existing();
  if (needs_staging()) {
    begin_staged();
  } else {
    begin_in_place(deadline);
  }
}

// Refuses before the location is locked, because the lock's file would stay there. If another save
// changes the location meanwhile, only the check under the lock counts. Each save of ours changes
// the names there.
void Transaction::refuse_other_files() const {
  const std::vector<std::string> names = location_->list();
  try {
    expect_only_checkpoint(*location_, format_, overwrite_ ? dialect_.get() : nullptr);
  } catch (const Error&) {
    if (!is_saved_to(*location_) && names == location_->list()) throw;
  }
}

// Checks the location again after begin() did, because it may have changed before it was locked.
void Transaction::begin_staged() {
  refuse_other_files();
  staging_.emplace(storage_, save_id_);
  staging_->begin();
  refuse_existing();
  expect_only_checkpoint(*storage_, format_, overwrite_ ? dialect_.get() : nullptr);
  storage_ = staging_->storage();
}

void Transaction::begin_in_place(Deadline deadline) {
  clean_siblings(*storage_);
  make_and_lock(deadline);
  // A checkpoint may have appeared before the lock was taken.
  refuse_existing();
  if (needs_staging()) fail_under_way(*storage_);
  storage_->sync_directory("");
  finish_replacement();
  inspect_existing();
  leave_note(*storage_, save_id_, noted_, deadline);
  has_note_ = true;
}

std::optional<ForeignCheckpoint> Transaction::foreign() const {
  return find_foreign(location_->list(), [&](const std::string& name) {
    return read_file(*location_, name, UINT64_MAX);
  });
}

// The saves without a communicator that may still become the checkpoint here. Beside an ordinary
// checkpoint, an attempt with the outcome "published" can't, and neither can one that the
// checkpoint's save has replaced. A rank-local checkpoint may still become an ordinary one, unless
// this save may replace it.
std::set<std::string> Transaction::open_attempts(const Notes& notes) const {
  ExistingCheckpoint existing;
  try {
    existing = read_existing(*location_, format_);
  } catch (const Error&) {
    return notes.open(any_checkpoint(*location_, *format_));  // an unreadable one counts too
  }
  const bool rank_local = !existing.rank_local.empty();
  std::set<std::string> open = notes.open(existing.found && !rank_local);
  if (!existing.found) return open;
  const bool undecided = notes.undecided.contains(existing.save_id);
  if (rank_local && undecided && overwrite_) open.erase(existing.save_id);
  const auto replaced = notes.replaces.find(existing.save_id);
  if (replaced == notes.replaces.end()) return open;
  for (const std::string& save_id : replaced->second) open.erase(save_id);
  return open;
}

// Refuses beside a save without a communicator that may still become the checkpoint here, because
// this save would make its files leftovers.
void Transaction::refuse_open_attempts() const {
  const std::vector<std::string> names = location_->list(std::string(kTilestoneDirectory) + "/");
  const Notes notes = read_notes(*location_, names);
  if (notes.attempts.empty()) return;
  const std::set<std::string> open = open_attempts(notes);
  if (open.empty()) return;
  throw Error(ErrorCode::kAlreadyExists, "the save " + *open.begin() + " at " +
                                             location_->describe() +
                                             ", without a communicator, is not published yet")
      .with_file(attempt_name(*open.begin()))
      .with_hint(
          "`tilestone publish` completes it if all its ranks have written; `tilestone gc "
          "--abandon` ends it if they are dead");
}

// A file may be lost while another save replaces the location.
void Transaction::refuse_existing() const {
  constexpr int kMaxTries = 8;
  for (int tries = 1;; ++tries) {
    try {
      return refuse_what_exists();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound || tries == kMaxTries) throw;
    }
  }
}

void Transaction::refuse_what_exists() const {
  refuse_open_attempts();
  if (const auto other = foreign()) {
    const std::string stands = other->kind + " exists at " + location_->describe();
    if (!overwrite_) {
      throw Error(ErrorCode::kAlreadyExists, stands)
          .with_file(other->mark)
          .with_reason(Reason::kCheckpointExists)
          .with_hint(Hint{{"save elsewhere, or replace it with ", "overwrite", "true"}});
    }
    if (!other->replaceable && !dialect_->shares_directory()) {
      throw Error(ErrorCode::kUnsupported, stands + ", and its files can't be replaced in one step")
          .with_file(other->mark)
          .with_hint("save elsewhere, or remove that checkpoint first");
    }
  }
  if (overwrite_ || !any_checkpoint(*location_, *format_)) return;
  throw Error(ErrorCode::kAlreadyExists, "a checkpoint exists at " + location_->describe())
      .with_reason(Reason::kCheckpointExists)
      .with_hint(Hint{{"save elsewhere, or replace it with ", "overwrite", "true"}});
}

// The last rename of the save would fail.
void Transaction::refuse_directory_of_index() const {
  const std::vector<std::string> directories = storage_->list_directories();
  if (!format_->detect(directories)) return;
  throw Error(ErrorCode::kUnsupported, "a directory at " + storage_->describe() +
                                           " has the name of a file that makes a checkpoint")
      .with_file(format_->index_files(directories).front())
      .with_hint("remove that directory, or save elsewhere");
}

// Whether the new or the existing checkpoint has files whose names contain no save id. A stock
// reader would mix old and new ones. If the location is empty and has no parent for a staging
// directory, the save can be made in place, because the switch is published last.
bool Transaction::needs_staging() const {
  if (dialect_->shares_directory()) return false;
  const std::vector<std::string> names = storage_->list();
  if (!has_fixed_names(*format_, *dialect_)) {
    const DetectedFormat existing = detect_format(
        names, [&](const std::string& name) { return read_file(*storage_, name, UINT64_MAX); });
    if (!foreign() && !(existing.format && has_fixed_names(*existing.format, *existing.dialect))) {
      return false;
    }
  }
  return storage_->parent() || !std::all_of(names.begin(), names.end(), in_tilestone_directory);
}

// Meanwhile the pruning of a run may remove the directory: while it is empty, it is what a killed
// save has left. (step_removal.cc)
void Transaction::make_and_lock(const Deadline& deadline) {
  constexpr int kMaxTries = 8;
  for (int tries = 1;; ++tries) {
    try {
      if (MadeDirectories made(*storage_); made.size() > made_.size()) made_ = std::move(made);
      storage_->make_directory("");
      refuse_directory_of_index();
      makes_own_ = makes_own_ || !storage_->stat(std::string(kTilestoneDirectory));
      storage_->make_directory(std::string(kTilestoneDirectory));
      if (lock()) return;
      if (tries == kMaxTries || !is_being_removed(*storage_, deadline)) fail_under_way(*storage_);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound || tries == kMaxTries) throw;
    }
  }
}

// False: another holds the lock.
bool Transaction::lock() {
  try {
    lock_ = try_lock_location(*storage_);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    log(LogLevel::kWarning,
        std::string("the location can't be locked, so nothing prevents two saves at the same time, "
                    "and files that failed saves have left stay: ") +
            error.what());
    return true;
  }
  return lock_ != nullptr;
}

// Finds out which files the existing checkpoint consists of, and removes leftovers. If the
// checkpoint can't be read, or has only lost its metadata, nothing is removed before the new
// checkpoint exists.
void Transaction::inspect_existing() {
  const std::vector<std::string> names = storage_->list();
  // Rank-local metadata must be replaced even if it can't be read or is beside an ordinary index:
  // otherwise it would remain beside the new index.
  for (std::string& name : format_->rank_local_files(names)) {
    old_rank_local_.insert(std::move(name));
  }
  ExistingCheckpoint old;
  try {
    // Zarr arrays in a shared directory may belong to somebody else.
    const bool replaced = !dialect_->shares_directory() || format_->detect(names);
    if (replaced) old = read_existing(*storage_, format_);
  } catch (const Error& error) {
    log(LogLevel::kWarning,
        std::string(
            "the checkpoint to be replaced can't be read, so some of its files may stay: ") +
            error.what());
    // Its save is one of these. None of the attempts is open (refuse_existing).
    noted_.merge(recorded_saves(*storage_, names));
    return;
  }
  old_files_ = std::move(old.files);
  if (old.found) noted_.insert(old.save_id);
  // After a removal of keys (removal.h), data files still have the id of the save that wrote them.
  for (const std::string& name : old_files_) {
    if (const auto own = parse_tilestone_name(name)) noted_.insert(own->noted);
  }
  if (!old.found) {
    if (const auto lost = find_lost(*storage_, names, read_notes(*storage_, names))) {
      log(LogLevel::kWarning,
          lost->what + (lost->began_here ? "; they are removed once the new checkpoint exists"
                                         : "; this save does not remove them"));
      return;
    }
  }
  remove_leftovers(old_files_, old.save_id);
}

void Transaction::remove_leftovers(const std::set<std::string>& referenced,
                                   const std::string& existing) {
  if (lock_ == nullptr) return;  // the files may belong to a save that is under way
  try {
    const std::vector<std::string> names = storage_->list();
    const Notes notes = read_notes(*storage_, names);
    std::vector<std::string> found = leftovers(names, referenced, notes.ended(existing));
    // Ranks of this save may still look for its receipts.
    std::erase_if(found, [&](const std::string& name) {
      const auto own = parse_tilestone_name(name);
      return notes.unread.contains(name) ||
             (own && own->kind == kReceiptKind && own->save_id == save_id_);
    });
    remove_leftover_files(*storage_, found);
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("leftovers of earlier saves stay: ") + error.what());
  }
}

void Transaction::prepare(ToPublish given, Deadline deadline) {
  expect_files(*storage_, given.save.receipts, given.threads, deadline);
  given.save.save_id = save_id_;
  given.save.writer = writer_name();
  given.save.inventory = given.step != nullptr;
  NewIndex made = describe_save(std::move(given.save), *format_, *dialect_);
  if (given.step != nullptr) compare_with_before(*given.step, made.inventory);
  step_ = std::move(given.step);
  inventory_ = std::move(made.inventory);
  index_ = std::move(made.index);
  new_files_.merge(made.files);
  if (!staging_) {
    const IndexFile& file = switch_file(index_);
    storage_->prepare_publish(temporary_of(file), file.bytes, deadline);
  }
  if (given.manifest) {
    const std::string name = manifest_name(save_id_);
    new_files_.insert(name);
    storage_->publish(name, temporary_name(save_id_, "manifest"), made.manifest, false, deadline);
  }
  if (!old_rank_local_.empty()) mark_replaced(deadline);
  // A save that takes no lock (one without a communicator, or any save where the storage has no
  // locks) may have come since step 1. This check must precede publish_before(), whose files may
  // themselves look like a checkpoint.
  if (!staging_) refuse_existing();
  publish_before(given.threads, deadline);
  if (!staging_) return;
  publish(IndexRole::kSwitch, deadline);
  publish(IndexRole::kAfter, deadline);
  refuse_existing();
}

void Transaction::commit(Deadline deadline) {
  was_tried_ = true;
  if (staging_) {
    staging_->publish();
  } else {
    publish_switch(deadline);
  }
  if (step_ != nullptr) {
    step_->now = std::move(inventory_);
    step_->save_id = save_id_;
  }
  if (!staging_) publish(IndexRole::kAfter, deadline);
}

std::string Transaction::temporary_of(const IndexFile& file) const {
  return temporary_name(save_id_, base_name(file.name));
}

void Transaction::publish_switch(Deadline deadline) {
  const IndexFile& file = switch_file(index_);
  try {
    storage_->publish_prepared(file.name, temporary_of(file), file.bytes, overwrite_, deadline);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kAlreadyExists) {
      remove_files(*storage_, std::vector{temporary_of(file)});
    } else if (!overwrite_) {
      withdraw_switch(file);
    }
    throw;
  }
}

// The name was free, and was taken, but may not outlive a power failure. What it names stays.
void Transaction::withdraw_switch(const IndexFile& file) {
  try {
    if (storage_->stat(temporary_of(file))) return;
    storage_->rename(file.name, temporary_of(file), false);
    storage_->sync_directory("");
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("a checkpoint may come back after a power failure, though "
                                        "its save has failed: ") +
                                error.what());
  }
}

// No existing file has these names: they contain this save's id, or are in its own directory.
void Transaction::publish_before(int threads, Deadline deadline) {
  std::vector<NewFile> files;
  for (const IndexFile& file : index_) {
    if (file.role == IndexRole::kBefore) files.push_back({&file.name, file.bytes});
  }
  write_new_files(*storage_, files, threads, deadline,
                  [&](const std::string& name) { published_.push_back(name); });
}

void Transaction::publish(IndexRole role, Deadline deadline) {
  for (const IndexFile& file : index_) {
    if (file.role != role) continue;
    try {
      storage_->publish(file.name, temporary_of(file), file.bytes, overwrite_, deadline);
    } catch (const Error& error) {
      // The file may have been published all the same, unless another file already had its name.
      if (error.code() != ErrorCode::kAlreadyExists) published_.push_back(file.name);
      throw;
    }
    published_.push_back(file.name);
  }
}

void Transaction::clean() {
  if (staging_) return staging_->clean();
  try {
    remove_rank_local();
    std::vector<std::string> replaced;
    for (const std::string& name : old_files_) {
      // The names may come from another writer's metadata. Of the files in kTilestoneDirectory,
      // remove only those with a name of ours.
      const bool ours_to_remove = !in_tilestone_directory(name) || is_own_name(name);
      if (ours_to_remove && name != switch_file(index_).name && !new_files_.contains(name)) {
        replaced.push_back(name);
      }
    }
    // If some files stay, the note stays too.
    if (!remove_files(*storage_, replaced)) return;
    if (!replaced.empty()) storage_->sync_directory("");
    if (lock_ == nullptr) remove_files(*storage_, std::vector{note_name(save_id_)});
    remove_leftovers(new_files_, save_id_);
    if (lock_ != nullptr) remove_directories_of_replaced();
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("files of the replaced checkpoint stay: ") + error.what());
  }
}

void Transaction::abandon(bool none_writes) {
  if (staging_) return staging_->abandon();
  // These files describe a checkpoint that has no switch and whose data files will be removed.
  remove_files(*storage_, published_);
  const std::string manifest = manifest_name(save_id_);
  // The temporary file shows of a manifest that its save was not published.
  const auto remove = [&](const std::string& file) { return remove_files(*storage_, {&file, 1}); };
  const bool has_none = !new_files_.contains(manifest) || remove(manifest);
  if (has_none && !index_.empty()) remove(temporary_of(switch_file(index_)));
  // Before its note is left, no rank has written.
  if (has_note_ && (!none_writes || !remove_note())) return;
  if (makes_own_) remove_lock_directory(*location_, lock_);
  made_.remove();
}

// False: the note stays, for data files that could not be removed.
bool Transaction::remove_note() {
  try {
    const Deadline patience = Deadline::after(kOthersRemove);
    std::chrono::duration<double> wait{0.01};
    for (; holds_files(*storage_, save_id_); wait *= 2) {
      if (patience.expired()) return false;
      pause(wait, patience);
    }
    return remove_files(*storage_, std::vector{note_name(save_id_)});
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("the note of a failed save stays: ") + error.what());
    return false;
  }
}

}  // namespace tilestone::engine
