// The protocol of saves in a sibling. Files of some formats and dialects have names that contain no
// save id: zarr's files, Megatron-Core's common.pt and metadata.json. If the new checkpoint or the
// existing one has such files, one rename can't switch them, and a stock reader would mix the files
// of two saves. Such a save makes a directory of its own beside the location,
// ".NAME.tilestone-SAVE_ID", and all its ranks write there. Symbolic links are resolved first: NAME
// is the name of the directory itself.
//
//  1. The coordinator removes what dead saves have left beside the location, and refuses if a save
//     there is alive. It makes its directory and locks it (kLockName within), looks for live saves
//     once more, and locks the location unless that is empty. Since the whole location will be
//     removed, it refuses unless every file there belongs to a checkpoint or to a dead save. (With
//     overwrite, files of an unfinished save of stock Megatron-Core are accepted too:
//     expect_only_checkpoint().) The ranks get the directory's name with their orders.
//  2. The ranks write their data files in the directory, sync them and report.
//  3. The coordinator checks the reports and writes the manifest and the whole index in the
//     directory. Then it looks at the location once more, because an empty one is not locked.
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
// after it belongs to the old tree; Storage::claim() detects that. Two first saves to one
// location exclude each other by steps 1 and 4.
//
// Readers hold the directory open (Storage::held). If it is replaced meanwhile, they continue to
// see the old one until its files are removed. The files that describe it are removed first, so a
// reader that has them gets an error for each file that is gone. A reader that finds only some of
// them does not believe what it finds, because the directory no longer stands (find_checkpoint()).
#include "tilestone/engine/commit/sibling_internal.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/base/pause.h"
#include "tilestone/engine/commit/old_checkpoint_internal.h"
#include "tilestone/engine/commit/whole_removal_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/megatron_mark.h"
#include "tilestone/storage/directories.h"

namespace tilestone::engine {
namespace {

constexpr std::string_view kInfix = ".tilestone-";
constexpr const char* kFreshHint = "save to a directory that does not exist yet";

std::string sibling_prefix(std::string_view name) {
  return "." + std::string(name) + std::string(kInfix);
}

static_assert(kSiblingLonger == 1 + kInfix.size() + 36);  // the dot, the infix, a save id

// If the working directory were replaced, the process would be left in a removed directory.
void expect_outside(const StorageEntry& entry) {
  std::error_code error;
  const std::string here = std::filesystem::current_path(error).string() + "/";
  const std::string above = entry.storage->describe();
  const std::string path = above + (above.ends_with('/') ? "" : "/") + entry.name + "/";
  if (error || !here.starts_with(path)) return;
  throw Error(
      ErrorCode::kUnsupported,
      "the working directory of this process is inside the directory that this save replaces")
      .with_file(path)
      .with_hint("change to another directory first");
}

StorageEntry expect_parent(Storage& location) {
  if (auto entry = location.parent()) {
    expect_outside(*entry);
    return std::move(*entry);
  }
  throw Error(ErrorCode::kUnsupported,
              "no directory can be made beside " + location.describe() +
                  ", which this save needs: its files can't be replaced one by one")
      .with_hint("save to a directory that has a parent directory");
}

// Removes a tree. The files that make it a checkpoint are removed first, so that a process that
// still reads it gets an error.
void remove_checkpoint(Storage& parent, const std::string& name) {
  const auto tree = parent.child(name);
  remove_files(*tree, describing_files(*tree, tree->list()));
  parent.remove_tree(name);
}

// Takes the lock of `place`. Null where the storage has no locks. Error(kAlreadyExists) where
// `holder` holds it.
std::unique_ptr<StorageClaim> acquire(Storage& place, Storage& location, std::string_view holder) {
  auto lock = lock_if_possible(place);
  if (lock && *lock == nullptr) fail_under_way(location, holder);
  return lock ? *std::move(lock) : nullptr;
}

bool repairs(Storage& location) {
  const std::string end = temporary_name("", kRepairMark).substr(kTilestoneDirectory.size() + 1);
  const std::vector<std::string> names =
      location.list_files(std::string(kTilestoneDirectory) + "/");
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name.ends_with(end); });
}

bool is_empty(Storage& location) {
  const Listing found = location.listing("", Depth::kLevel);
  return found.files.empty() && found.directories.empty();
}

// The holder of the location's lock, or of that of a save beside it.
std::string holder_at(Storage& location) {
  if (std::string holder = lock_holder(location); !holder.empty()) return holder;
  const Siblings siblings(location);
  for (const Sibling& sibling : siblings.find()) {
    if (std::string holder = siblings.holder(sibling); !holder.empty()) return holder;
  }
  return "";
}

}  // namespace

void fail_under_way(Storage& storage, std::string_view what, std::string_view hint) {
  if (repairs(storage)) what = "a repair";
  throw Error(ErrorCode::kAlreadyExists,
              std::string(what) + " is under way at " + storage.describe() + holder_at(storage))
      .with_file(kLockName)
      .with_reason(Reason::kUnderWay)
      .with_hint(std::string(hint));
}

std::string sibling_name(std::string_view location, std::string_view save_id) {
  return sibling_prefix(location).append(save_id);
}

std::optional<SiblingName> parse_sibling_name(std::string_view name) {
  const size_t at = name.rfind(kInfix);
  if (!name.starts_with('.') || at == std::string_view::npos || at < 2) return std::nullopt;
  SiblingName found{std::string(name.substr(1, at - 1)),
                    std::string(name.substr(at + kInfix.size()))};
  if (!is_save_id(found.save_id)) return std::nullopt;
  return found;
}

Siblings::Siblings(Storage& location) : entry_(location.parent()) {}

std::vector<Sibling> Siblings::find() const {
  std::vector<Sibling> found;
  if (!entry_) return found;
  const std::string prefix = sibling_prefix(entry_->name);
  for (std::string& name : entry_->storage->list_directories(prefix)) {
    std::string save_id = name.substr(prefix.size());
    if (is_save_id(save_id)) found.push_back({std::move(name), std::move(save_id)});
  }
  return found;
}

bool Siblings::is_alive(const Sibling& sibling) const {
  return entry_->storage->is_claimed(sibling.name + "/" + std::string(kLockName));
}

std::string Siblings::holder(const Sibling& sibling) const {
  return lock_holder(*entry_->storage, sibling.name + "/" + std::string(kLockName));
}

uint64_t Siblings::size_of(const Sibling& sibling) const {
  uint64_t bytes = 0;
  const auto tree = entry_->storage->child(sibling.name);
  for (const std::string& name : tree->list()) {
    const auto info = tree->stat(name);
    if (info) bytes += info->size;
  }
  return bytes;
}

bool Siblings::remove_dead(const Sibling& sibling) const {
  Storage& parent = *entry_->storage;
  if (is_alive(sibling)) return false;
  auto lock = parent.claim(sibling.name + "/" + std::string(kLockName));
  if (lock == nullptr) return false;
  parent.settle("");
  try {
    remove_checkpoint(parent, sibling.name);
    return true;
  } catch (...) {
    lock.reset();
    return remove_unlocked(sibling);
  }
}

// Called after a removal under the lock has failed. Its save may have just begun, and made a new
// lock file after the old one was removed. Or a file that is removed while it is open stays in its
// directory, under another name, until it is closed: seen on FUSE, documented for NFS. That file is
// the lock's. FUSE closes files a little late.
bool Siblings::remove_unlocked(const Sibling& sibling) const {
  constexpr int kMaxTries = 100;
  constexpr auto kBetweenTries = std::chrono::milliseconds(20);
  for (int tries = 1;; ++tries) {
    if (is_alive(sibling)) return false;
    try {
      remove_checkpoint(*entry_->storage, sibling.name);
      return true;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kNotFound) return true;
      if (error.sys_errno() != ENOTEMPTY || tries == kMaxTries) throw;
    }
    std::this_thread::sleep_for(kBetweenTries);
  }
}

void expect_directories(Storage& location, const SaveTerms& terms, bool is_empty) {
  if (location.directories() != nullptr) return;
  if (terms.format->has_fixed_names() && !terms.one_writer) {
    throw Error(ErrorCode::kUnsupported,
                "a checkpoint in the format " + std::string(terms.format->name()) +
                    " can't be saved at " + location.describe() +
                    ": its files have fixed names, which an object store can't switch as a whole")
        .with_hint(
            "save in the format torch_dist, which `tilestone convert` can make zarr of there, or "
            "to "
            "a directory of a file system");
  }
  if (is_empty) return;
  throw Error(ErrorCode::kUnsupported, "this save can't replace what is at " + location.describe() +
                                           ": files with fixed names would be replaced, one by one")
      .with_hint("save under a prefix where nothing is yet");
}

void clean_siblings(Storage& location, std::string_view own) {
  try {
    const Siblings siblings(location);
    for (const Sibling& sibling : siblings.find()) {
      if (sibling.name == own) continue;
      if (!siblings.remove_dead(sibling)) fail_under_way(location);
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kAlreadyExists) throw;
    if (error.code() == ErrorCode::kNotFound) return;  // another process has removed it
    log(LogLevel::kWarning, "directories that earlier saves have left beside " +
                                location.describe() + " stay: " + error.what());
  }
}

namespace {

// Reads the existing checkpoint. Error(kUnsupported) if it can't be read.
ExistingCheckpoint expect_readable(Storage& location, const Standing& here) {
  try {
    return read_existing(location, here);
  } catch (const Error& error) {
    throw Error(ErrorCode::kUnsupported,
                "the existing checkpoint at " + location.describe() +
                    " can't be read, so it is not known which files belong to it: " + error.what())
        .with_hint("save elsewhere, or remove that checkpoint first");
  }
}

bool is_made_in_own_directory(const std::string& name) {
  return parse_in_tilestone_directory(name) || name == kLockName || name == kReplacedName;
}

// Whether the file is an empty data file: stock torch makes one for a rank that has nothing to
// write.
bool is_empty_stock_file(Storage& location, const std::string& name) {
  const auto info = name.ends_with(".distcp") ? location.stat(name) : std::nullopt;
  return info && info->regular && info->size == 0;
}

// Whether a file begins like one of torch.save. A file that is empty or cut off counts too.
bool is_archive(Storage& location, const std::string& name) {
  const auto file = location.open(name);
  std::array<std::byte, 2> begin = {};
  const uint64_t size = std::min<uint64_t>(file->size(), begin.size());
  const ReadOp op{file.get(), 0, size, begin.data()};
  if (size > 0) location.read({&op, 1}, {}, [](size_t, ByteView) {});
  return as_text(ByteView(begin).first(size)) == std::string_view("PK").substr(0, size);
}

// Whether the file may be from an unfinished save of stock Megatron-Core. That writes .metadata
// last but one and metadata.json last.
bool is_unfinished_stock_file(Storage& location, const std::string& name) {
  if (name == kMegatronCommon) return is_archive(location, name);
  return name == ".metadata.tmp" ||
         (parse_data_file_name(name) && name.find('/') == std::string::npos);
}

}  // namespace

void expect_only_checkpoint(Storage& location, const Standing& here, const Dialect* remains_of) {
  const std::vector<std::string>& names = here.names;
  const ExistingCheckpoint existing = expect_readable(location, here);
  const std::string_view mark = remains_of == nullptr ? "" : remains_of->mark();
  const bool unfinished = !mark.empty() && existing.save_id.empty() && !contains_name(names, mark);
  const std::set<std::string> ended = here.notes.ended(existing.save_id);
  const auto is_left = [&](const std::string& name) {
    const auto own = parse_tilestone_name(name);
    return own && is_leftover(*own, ended);
  };
  for (const std::string& name : names) {
    if (is_made_in_own_directory(name) || is_left(name)) continue;
    if (existing.files.contains(name) || existing.index.contains(name)) continue;
    if (existing.found && (name == kMegatronHashes || is_empty_stock_file(location, name))) {
      continue;
    }
    if (unfinished && is_unfinished_stock_file(location, name)) continue;
    throw Error(ErrorCode::kUnsupported,
                "this save replaces " + location.describe() +
                    " as a whole, but a file there belongs to no checkpoint")
        .with_file(name)
        .with_hint("save elsewhere, or move that file away");
  }
}

std::shared_ptr<Storage> sibling_storage(Storage& location, const std::string& name) {
  const StorageEntry entry = expect_parent(location);
  const auto info = entry.storage->stat(name);
  if (info && !info->regular) return entry.storage->child(name);
  fail_elsewhere(location, name);
}

// A network file system may show late what another host has made.
void expect_begun_here(Storage& location, const std::string& save_id, const Deadline& deadline) {
  constexpr std::chrono::duration<double> kLongestLook{1}, kPause{0.1};
  const Deadline patience = Deadline::after(kLongestLook);
  while (!location.stat(note_name(save_id))) {
    if (patience.expired() || deadline.expired()) fail_elsewhere(location, note_name(save_id));
    pause(kPause, deadline);
  }
}

void fail_elsewhere(const Storage& location, const std::string& file) {
  throw Error(ErrorCode::kIo,
              "this rank sees another directory at " + location.describe() +
                  " than rank 0: what rank 0 has begun there is not there for this rank")
      .with_file(file)
      .with_hint(
          "all ranks need one file system at this path: look whether it is a disk of each node, or "
          "a mount that is missing on one");
}

NewSibling::NewSibling(std::shared_ptr<Storage> location, std::string_view save_id)
    : location_(std::move(location)),
      entry_(expect_parent(*location_)),
      save_id_(save_id),
      name_(sibling_name(entry_.name, save_id_)),
      storage_(entry_.storage->child(name_)) {}

// Each save locks its own directory before it looks for others'. So of two saves that begin
// together, at least one sees the other.
void NewSibling::begin() {
  made_ = MadeDirectories(*location_);
  clean_siblings(*location_);
  make_and_lock();
  copy_permissions();
  clean_siblings(*location_, name_);
  exchanges_ = !is_empty(*location_);
  if (!exchanges_) return;
  makes_own_ = !location_->stat(std::string(kTilestoneDirectory));
  location_lock_ = acquire(*location_, *location_, "another save");
  // Tried in this directory, so that what a killed trial leaves is removed with it.
  if (storage_->directories()->can_exchange()) return;
  throw Error(ErrorCode::kUnsupported,
              location_->describe() +
                  " is not empty, and the file system can't exchange two directories in one step")
      .with_hint(kFreshHint);
}

// Another save or a gc may remove the directory as a leftover before it is locked.
void NewSibling::make_and_lock() {
  constexpr int kMaxTries = 8;
  for (int tries = 1;; ++tries) {
    try {
      lock_ = acquire(*storage_, *location_, "a removal of leftovers");
      return;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kNotFound && tries < kMaxTries) continue;
      if (error.code() == ErrorCode::kAlreadyExists) throw;
      const std::string hint =
          "this save needs a directory beside its location, because its files "
          "can't be replaced one by one";
      const std::string longer_by =
          "; its name is " + std::to_string(kSiblingLonger) + " bytes longer";
      throw Error(error).with_hint(error.sys_errno() == ENAMETOOLONG ? hint + longer_by : hint);
    }
  }
}

// Before any file is written, so that the files of a private directory are never seen by others.
void NewSibling::copy_permissions() {
  or_log(LogLevel::kWarning,
         "the permissions of the directory " + location_->describe() +
             " can't be given to the one that replaces it",
         [&] {
           const auto info = entry_.storage->stat(entry_.name);
           if (!info || info->regular) return;
           entry_.storage->directories()->copy_permissions(name_, entry_.name);
         });
}

// Of a rename that is not executed later either.
constexpr std::array kRefusals{EACCES, EPERM, EROFS, ENOSPC, EDQUOT};

void NewSibling::publish() {
  try {
    if (exchanges_) {
      entry_.storage->directories()->exchange(entry_.name, name_);
    } else {
      entry_.storage->directories()->rename(name_, entry_.name);
    }
  } catch (const Error& error) {
    const bool unchanged = error.code() == ErrorCode::kUnsupported ||
                           error.code() == ErrorCode::kAlreadyExists ||
                           error.code() == ErrorCode::kNotFound ||
                           std::ranges::find(kRefusals, error.sys_errno()) != kRefusals.end();
    if (!unchanged && !exchanges_ && moves_again()) return;
    if (!unchanged && !moves_back()) throw;
    abandon();
    Error failure(error);
    if (error.code() == ErrorCode::kAlreadyExists) {
      failure.with_hint("another save or program has made files there meanwhile");
    }
    throw failure;
  }
}

// A file whose name is not durable might or might not outlive a power failure, and would stand in
// the way.
void NewSibling::publish_part(const std::string& made, bool is_folder) {
  Storage& above = *entry_.storage;
  const std::string from = name_ + "/" + made;
  if (is_folder) return above.directories()->rename(from, entry_.name);
  above.rename(from, entry_.name, false);
  try {
    above.settle("");
  } catch (...) {
    remove_files(above, std::vector{entry_.name});
    throw;
  }
}

void NewSibling::publish_over(const std::string& made) {
  Directories& above = *entry_.storage->directories();
  const std::string from = name_ + "/" + made;
  try {
    try {
      above.rename(from, entry_.name);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kAlreadyExists) throw;
      above.exchange(entry_.name, from);
      makes_own_ = false;  // the replaced folder, which is in the directory now, has it
    }
  } catch (const Error& error) {
    is_uncertain_ = error.code() == ErrorCode::kIo;
    throw;
  }
  made_ = {};
}

// After a rename to a name that was free, which may still be executed: it is tried until the answer
// is definite. False: it was made, and its sync may be what has failed; or no try was answered.
bool NewSibling::moves_again() {
  for (std::chrono::duration<double> wait{0.01}; wait < std::chrono::seconds(1); wait *= 5) {
    pause(wait, Deadline::never());
    try {
      if (!entry_.storage->stat(name_)) return false;
      entry_.storage->directories()->rename(name_, entry_.name);
      return true;
    } catch (const Error& error) {
      log(LogLevel::kDebug, "a rename is tried again: " + std::string(error.what()));
    }
  }
  return false;
}

// After a rename to a name that was free: its sync may be what has failed. The directory can't be
// taken back once it replaces another one.
bool NewSibling::moves_back() {
  if (exchanges_) return false;
  try {
    if (entry_.storage->stat(name_)) return false;  // not known; the next save or gc decides
    entry_.storage->directories()->rename(entry_.name, name_);
    return true;
  } catch (const Error& error) {
    log(LogLevel::kWarning, "the new checkpoint at " + location_->describe() +
                                " stands, though its save has failed: " + error.what());
    return false;
  }
}

void NewSibling::clean() {
  if (exchanges_) remove(location_lock_);  // the replaced checkpoint has the directory's name now
}

void NewSibling::abandon() {
  if (makes_own_ && location_lock_ != nullptr) {
    remove_lock_directory(*location_, location_lock_);
  }
  if (!is_uncertain_) remove(lock_);
  made_.remove();
  location_lock_.reset();
  lock_.reset();
}

void NewSibling::remove(std::unique_ptr<StorageClaim>& lock) {
  try {
    if (!entry_.storage->stat(name_)) return;
    try {
      remove_checkpoint(*entry_.storage, name_);
    } catch (const Error&) {
      lock.reset();
      Siblings(*location_).remove_unlocked({name_, save_id_});
    }
  } catch (const Error& error) {
    if (error.sys_errno() == ENAMETOOLONG) return;  // it could not be made either
    log(LogLevel::kWarning,
        std::string("an unneeded directory could not be removed: ") + error.what());
  }
}

}  // namespace tilestone::engine
