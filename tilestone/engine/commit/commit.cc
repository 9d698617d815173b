// The commit protocol.
//
// Names. Data files, manifest and temporary files of a save hold its save id, a random UUID, so no
// two saves ever use one name. The format's metadata file has one fixed name and names the save id
// and the data files: it alone decides which checkpoint stands at a location.
//
//  1. The coordinator makes the directories, takes the lock, refuses or accepts what stands there,
//     removes what failed attempts have left (where the storage has no locks that stays, here and
//     in 5: it may be another save's), and leaves a note (note_name) that this save has begun here
//     and which save's checkpoint it will replace. The note is durable before 2.
//  2. Each rank writes its data files, syncs them, syncs their directory, and reports.
//  3. The coordinator merges the reports (coverage is checked), opens each file that a rank
//     reported, so that no rank has written to another directory than its own, and publishes the
//     manifest: written to a temporary file, synced, renamed, directory synced. Files of the index
//     that come before the switch have new names, and say nothing without it: they are written
//     under them, many at a time, and synced, and then their directories are (new_files.cc).
//     It looks once more for what 1 refuses: a save without a communicator takes no lock.
//  4. The coordinator publishes the metadata file in the same way. The rename is the commit.
//  5. The coordinator removes the files of the checkpoint that was replaced, and leftovers; once
//     they are gone for good, the note.
//
// What may be removed. Files of a save of which a note says that it began here, and that the
// metadata does not name; and files of a save that the one which stands has replaced, as its note
// says. Anything else of such a name has been copied here, and is somebody's only copy for all we
// know: no save removes it.
//
// A crash at any point:
//  before the rename of 4  The metadata file, if there is one, is the old one, and nothing that it
//                          names has been touched: all new files have new names. Without an old
//                          one there is no checkpoint. New files are leftovers: the next save
//                          knows them by the note and that the metadata doesn't name them.
//  at the rename           The file system shows the old or the new metadata. Both are whole (the
//                          new one was synced before) and so is all that either names: 2 and 3
//                          ended before, and 5 has not begun.
//  after 4                 The directory has been synced, so the old metadata can't come back when
//                          5 removes what it named. What 5 does not get to is a leftover, of
//                          which the note speaks.
//  When the rename or the sync after it fails, nobody can know which metadata a later boot will
//  show: no rank removes anything then, neither new files nor old ones.
//
// Step 1 of a later save reads the metadata to know what may go. A crash between the rename and
// the directory sync of an earlier 4 could take that metadata back, so 1 syncs the directory
// before it removes anything.
//
// A rank-local checkpoint has no metadata file but one for each rank, and the two kinds side by
// side are ambiguous to a reader. They can't be switched in one rename, so before 4 a small file
// (kReplacedName) says: the save with this id replaces rank-local files of these names and
// contents. A reader that finds both kinds takes the metadata file if, and only if, it is of that
// id and every rank-local file is among those. Step 5 removes them first, then the note; step 1 of
// a later save does so where 5 was interrupted.
//
// Staged saves (staging.cc). Where the new checkpoint's files, or those of the one that stands,
// have names that say nothing of their save (zarr's, Megatron-Core's common.pt and metadata.json),
// one rename can't switch them, and a stock reader would take files of two saves together. Such a
// save makes a directory of its own beside the location, ".NAME.tilestone-SAVE_ID", and all its
// ranks write there. Links are resolved first: NAME is the directory's own name.
//
//  1. The coordinator removes what dead saves have left beside the location, and refuses where one
//     is alive; makes its directory and locks it (kLockName within); looks once more for others
//     that live; locks what stands at the location, unless that is empty; and refuses what stands
//     there unless every file belongs to a checkpoint or to a dead save (with overwrite also one of
//     stock Megatron-Core, expect_only_checkpoint()), since all of it will go.
//     The directory's name travels to the ranks with their orders.
//  2. As above, in the directory.
//  3. As above, and the whole index: in the directory, before, at and after the switch. Then the
//     location is looked at once more, as above.
//  4. The commit. Where the location is absent or empty, the directory is renamed to it, which
//     fails if anything is there by then. Otherwise the two are exchanged in one step. Then the
//     parent directory is synced.
//  5. What was replaced, which has the directory's name now, is removed: the files that describe
//     it first.
//
// A crash at any point:
//  before 4  The location has not been touched but for kLockName. The directory is a leftover: its
//            name holds NAME and a save id, and nobody holds its lock, which dies with its save.
//  at 4      Either name stands for what it stood for before, or for what it stands for after: one
//            step of the file system. Both trees are whole and durable: 2 and 3 ended before, and 5
//            has not begun.
//  after 4   The exchange is durable before 5 removes anything. What 5 does not get to is a
//            leftover under the directory's name.
// Who removes a leftover takes its lock and syncs the parent first: an exchange of which a crash
// left no trace yet on the disk must not be taken back once files of the old tree go.
//
// Locks. A directory takes its lock along when it is renamed or exchanged, so who comes to the
// location during 5 finds it locked. A lock that was opened before an exchange and taken after it
// is one of the old tree: try_lock_location() notices. Two first saves to one location exclude
// each other by 1 and 4.
//
// Readers hold the directory open (Storage::held): one that is replaced meanwhile stays what it was
// until its files go, and those that describe it go first, so that what is gone is an error and
// never a part of another checkpoint.
//
// Shared directories (megatron_shards_dialect()). Megatron-Core itself has replaced common.pt there
// when a save of the sharded part begins, and writes metadata.json once it has ended. So nothing of
// ours could switch the whole of it, and steps 1 to 5 are those of a save in place: common.pt and
// files that the replaced .metadata does not name stay. The caller removes an older metadata.json
// first. From then until Megatron-Core's own save has ended, no reader of Megatron-Core's takes the
// directory for a checkpoint. Neither does ours once the new .metadata stands, since the manifest
// names the dialect (check_dialect() in open/opening.cc).
#include "tilestone/engine/commit/commit_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/open/attempt_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/write/new_files_internal.h"
#include "tilestone/format/foreign.h"
#include "tilestone/format/manifest.h"
#include "tilestone/version.h"

namespace tilestone::engine {
namespace {

bool in_own_directory(const std::string& name) {
  return name.starts_with(std::string(kOwnDirectory) + "/");
}

// "metadata" of ".metadata", "zarray" of "a/b/.zarray". One file at a time has a temporary one.
std::string base_name(const std::string& name) {
  const std::string last = name.substr(name.rfind('/') + 1);
  return last.substr(std::min(last.find_first_not_of('.'), last.size()));
}

bool holds_data(Storage& storage, const Format& format, const std::string& save_id) {
  for (const std::string& name : storage.list()) {
    const auto own = parse_own_name(format, name);
    if (own && own->kind == kDataKind && own->save_id == save_id) return true;
  }
  return false;
}

bool has_fixed_names(const Format& format, const Dialect& dialect) {
  return format.has_fixed_names() || dialect.has_fixed_names();
}

}  // namespace

Commit::Commit(std::shared_ptr<Storage> storage, std::shared_ptr<const Format> format,
               std::shared_ptr<const Dialect> dialect, std::string save_id, bool overwrite)
    : location_(std::move(storage)),
      storage_(location_),
      format_(std::move(format)),
      dialect_(std::move(dialect)),
      save_id_(std::move(save_id)),
      overwrite_(overwrite) {}

void Commit::begin(Deadline deadline) {
  refuse_existing();
  if (needs_staging()) {
    begin_staged();
  } else {
    begin_in_place(deadline);
  }
}

// What stands at the location may change before it is locked.
void Commit::begin_staged() {
  staging_.emplace(storage_, save_id_);
  staging_->begin();
  refuse_existing();
  expect_only_checkpoint(*storage_, format_, overwrite_ && dialect_->name() == "megatron");
  storage_ = staging_->storage();
}

void Commit::begin_in_place(Deadline deadline) {
  clean_siblings(*storage_);
  storage_->make_directory("");
  storage_->make_directory(std::string(kOwnDirectory));
  lock();
  // Another one may have appeared before the lock was ours.
  refuse_existing();
  if (needs_staging()) fail_under_way(*storage_);
  storage_->sync_directory("");
  finish_replacement();
  look_at_old();
  leave_note(*storage_, save_id_, replaces_, deadline);
  has_note_ = true;
}

std::optional<ForeignCheckpoint> Commit::foreign() const {
  return find_foreign(location_->list(), [&](const std::string& name) {
    return read_file(*location_, name, UINT64_MAX);
  });
}

// Beside one, a save that is decided on can't become the checkpoint any more. One of ranks' own
// metadata may be what that save is still to replace.
bool Commit::has_whole_checkpoint() const {
  try {
    const Standing standing = read_standing(*location_, format_);
    return standing.found && standing.rank_local.empty();
  } catch (const Error&) {
    return any_checkpoint(*location_, *format_);  // it can't be read, and may be replaced
  }
}

// One that is to become the checkpoint here without a communicator would lose its files.
void Commit::refuse_open_attempts() const {
  const std::vector<std::string> names = location_->list(std::string(kOwnDirectory) + "/");
  const Notes notes = read_notes(*location_, names);
  if (notes.attempts.empty()) return;
  const std::set<std::string> open = notes.open(has_whole_checkpoint());
  if (open.empty()) return;
  throw Error(ErrorCode::kAlreadyExists, "the save " + *open.begin() + " at " +
                                             location_->describe() +
                                             ", without a communicator, is not published yet")
      .with_file(attempt_name(*open.begin()))
      .with_hint(
          "`tilestone publish` completes it if all its ranks have written; `tilestone gc "
          "--abandon` ends it if they are dead");
}

void Commit::refuse_existing() const {
  refuse_open_attempts();
  if (const auto other = foreign()) {
    const std::string stands = other->kind + " stands at " + location_->describe();
    if (!overwrite_) {
      throw Error(ErrorCode::kAlreadyExists, stands)
          .with_file(other->mark)
          .with_hint("save elsewhere, or replace it with overwrite = true");
    }
    if (!other->replaceable && !dialect_->shares_directory()) {
      throw Error(ErrorCode::kUnsupported, stands + ", and its files can't be replaced in one step")
          .with_file(other->mark)
          .with_hint("save elsewhere, or remove that checkpoint first");
    }
  }
  if (overwrite_ || !any_checkpoint(*location_, *format_)) return;
  throw Error(ErrorCode::kAlreadyExists, "a checkpoint stands at " + location_->describe())
      .with_hint("save elsewhere, or replace it with overwrite = true");
}

// Whether files of the new checkpoint, or of the one that stands, have names that say nothing of
// their save: a stock reader would take old and new ones together. Where no directory can be made
// beside the location, but nothing stands there, the switch, which comes last, will do.
bool Commit::needs_staging() const {
  if (dialect_->shares_directory()) return false;
  const std::vector<std::string> names = storage_->list();
  if (!has_fixed_names(*format_, *dialect_)) {
    const DetectedFormat standing = detect_format(
        names, [&](const std::string& name) { return read_file(*storage_, name, UINT64_MAX); });
    if (!foreign() && !(standing.format && has_fixed_names(*standing.format, *standing.dialect))) {
      return false;
    }
  }
  return storage_->parent() || !std::all_of(names.begin(), names.end(), in_own_directory);
}

void Commit::lock() {
  try {
    lock_ = try_lock_location(*storage_);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    log(LogLevel::kWarning, std::string("nothing keeps two saves apart, and what failed ones have "
                                        "left stays: ") +
                                error.what());
    return;
  }
  if (lock_ == nullptr) fail_under_way(*storage_);
}

// An earlier save that replaced a rank-local checkpoint was interrupted in its step 5. It is ended
// here, since the note speaks of that save only.
void Commit::finish_replacement() {
  const auto replaced = find_replaced(*storage_, *format_);
  if (!replaced) return;
  for (const auto& [name, hash] : replaced->files) old_rank_local_.insert(name);
  remove_rank_local();
  old_rank_local_.clear();
}

// What the standing checkpoint consists of. When that can't be read, or one stands there that has
// only lost its metadata, nothing is removed before the new checkpoint stands.
void Commit::look_at_old() {
  const std::vector<std::string> names = storage_->list();
  // Those of one that can't be read, or beside an ordinary index, would stand beside the new index
  // all the same.
  for (std::string& name : format_->rank_local_files(names)) {
    old_rank_local_.insert(std::move(name));
  }
  Standing old;
  try {
    // Arrays of zarr in a shared directory may be anybody's.
    const bool replaced = !dialect_->shares_directory() || format_->detect(names);
    if (replaced) old = read_standing(*storage_, format_);
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("the checkpoint that is to be replaced can't be read, so "
                                        "files of it may stay: ") +
                                error.what());
    // Its save is one of those that have a manifest.
    for (const std::string& name : names) {
      const auto own = parse_own_name(*format_, name);
      if (own && own->kind == kManifestKind) replaces_.insert(own->save_id);
    }
    return;
  }
  old_files_ = std::move(old.files);
  if (old.found) replaces_.insert(old.save_id);
  // Data files that a removal (removal.h) has left have the id of the save that wrote them.
  for (const std::string& name : old_files_) {
    if (const auto own = parse_own_name(*format_, name)) replaces_.insert(own->save_id);
  }
  if (!old.found) {
    if (const auto lost = find_lost(*storage_, *format_, names, read_notes(*storage_, names))) {
      log(LogLevel::kWarning,
          lost->what + (lost->began_here ? "; they go once the new checkpoint stands"
                                         : "; this save does not remove them"));
      return;
    }
  }
  remove_leftovers(old_files_, old.save_id);
}

void Commit::remove_leftovers(const std::set<std::string>& referenced,
                              const std::string& standing) {
  if (lock_ == nullptr) return;  // they may be the files of a save that is under way
  try {
    const std::vector<std::string> names = storage_->list();
    const std::set<std::string> ended = read_notes(*storage_, names).ended(standing);
    remove_leftover_files(*storage_, *format_, leftovers(*format_, names, referenced, ended));
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("leftovers of earlier saves stay: ") + error.what());
  }
}

void Commit::prepare(Reported reported, Deadline deadline) {
  expect_files(*storage_, reported.reports, reported.threads, deadline);
  Descriptions made =
      describe_save({std::move(reported.reports), reported.encoded, reported.copies, save_id_,
                     std::string("Tilestone ") + kVersion, std::move(reported.attributes),
                     dialect_->encode_index(*reported.items, *format_), std::move(reported.remains),
                     std::move(reported.replicas)},
                    *format_, *dialect_);
  index_ = std::move(made.index);
  new_files_.merge(made.files);
  if (reported.manifest) {
    const std::string name = manifest_name(save_id_);
    new_files_.insert(name);
    storage_->publish(name, temporary_name(save_id_, "manifest"), made.manifest, false, deadline);
  }
  if (!old_rank_local_.empty()) mark_replaced(deadline);
  // What has no lock (a save without a communicator, or any where the storage has no locks) may
  // have come since step 1. The files that come next may themselves look like a checkpoint.
  if (!staging_) refuse_existing();
  publish_before(reported.threads, deadline);
  if (!staging_) return;
  publish(IndexRole::kSwitch, deadline);
  publish(IndexRole::kAfter, deadline);
  refuse_existing();
}

void Commit::mark_replaced(Deadline deadline) {
  Replaced replaced{save_id_, {}};
  for (const std::string& name : old_rank_local_) {
    replaced.files.emplace(name, xxh3_64(read_file(*storage_, name, UINT64_MAX)));
  }
  storage_->publish(std::string(kReplacedName), temporary_name(save_id_, "replaced"),
                    replaced.encode(), true, deadline);
}

void Commit::publish(Deadline deadline) {
  if (staging_) return staging_->publish();
  publish(IndexRole::kSwitch, deadline);
  publish(IndexRole::kAfter, deadline);
}

// Their names are new: of this save alone, or in a directory of its own.
void Commit::publish_before(int threads, Deadline deadline) {
  std::vector<NewFile> files;
  for (const IndexFile& file : index_) {
    if (file.role == IndexRole::kBefore) files.push_back({&file.name, file.bytes});
  }
  write_new_files(*storage_, files, threads, deadline,
                  [&](const std::string& name) { published_.push_back(name); });
}

void Commit::publish(IndexRole role, Deadline deadline) {
  for (const IndexFile& file : index_) {
    if (file.role != role) continue;
    try {
      storage_->publish(file.name, temporary_name(save_id_, base_name(file.name)), file.bytes,
                        overwrite_, deadline);
    } catch (const Error& error) {
      // But for a file that stood there before, it may be in place all the same.
      if (error.code() != ErrorCode::kAlreadyExists) published_.push_back(file.name);
      throw;
    }
    published_.push_back(file.name);
  }
}

void Commit::clean() {
  if (staging_) return staging_->clean();
  try {
    remove_rank_local();
    std::vector<std::string> replaced;
    for (const std::string& name : old_files_) {
      // The names are another writer's: what they may not name is left alone.
      const bool ours_to_remove = !in_own_directory(name) || is_own_name(*format_, name);
      if (ours_to_remove && name != switch_name(index_) && !new_files_.contains(name)) {
        replaced.push_back(name);
      }
    }
    // What stays of it keeps the note.
    if (!remove_files(*storage_, replaced)) return;
    if (!replaced.empty()) storage_->sync_directory("");
    if (lock_ == nullptr) remove_files(*storage_, std::vector{note_name(save_id_)});
    remove_leftovers(new_files_, save_id_);
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("files of the replaced checkpoint stay: ") + error.what());
  }
}

// The note goes last, and only when nothing is left that it speaks of.
void Commit::remove_rank_local() {
  const std::string note(kReplacedName);
  if (!storage_->stat(note)) return;
  remove_files(*storage_, std::vector(old_rank_local_.begin(), old_rank_local_.end()));
  storage_->sync_directory("");
  for (const std::string& name : old_rank_local_) {
    if (storage_->stat(name)) return;
  }
  remove_files(*storage_, std::vector{note});
}

void Commit::abandon(bool alone) {
  if (staging_) return staging_->abandon();
  // They describe a checkpoint that lacks its switch, and whose data files go.
  remove_files(*storage_, published_);
  const std::string manifest = manifest_name(save_id_);
  if (new_files_.contains(manifest)) remove_files(*storage_, std::vector{manifest});
  if (!alone || !has_note_) return;
  bool has_data = true;
  try {
    has_data = holds_data(*storage_, *format_, save_id_);
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("the note of a failed save stays: ") + error.what());
  }
  if (!has_data) remove_files(*storage_, std::vector{note_name(save_id_)});
}

}  // namespace tilestone::engine
