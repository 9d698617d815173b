// Saves in a sibling, for files that can't be switched by one rename. The whole checkpoint is
// written in a directory beside its location, ".NAME.tilestone-SAVE_ID", and moved into place in
// one step. sibling.cc describes the protocol.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/engine/commit/claim_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct SaveTerms;

// The end of the name of the file that exists while a repair holds the lock (repair.cc).
inline constexpr std::string_view kRepairMark = "repairing";
// Throws Error(kAlreadyExists): `what`, or a repair if one has left its mark, is under way at the
// location. Names the process that holds the lock, if the storage knows it.
[[noreturn]] void fail_under_way(Storage& storage, std::string_view what = "another save",
                                 std::string_view hint = "wait for it, or save elsewhere");

// By how many bytes its name is longer than the location's.
inline constexpr size_t kSiblingLonger = 48;

// A directory beside a location: one in which a save writes, or the checkpoint that it has
// replaced.
struct Sibling {
  std::string name;  // in the parent
  std::string save_id;
};

// ".NAME.tilestone-SAVE_ID", and back: the location's name and the save id.
std::string sibling_name(std::string_view location, std::string_view save_id);
struct SiblingName {
  std::string location, save_id;
};
std::optional<SiblingName> parse_sibling_name(std::string_view name);

// The siblings of a location. There are none where the location has no parent.
class Siblings {
 public:
  explicit Siblings(Storage& location);

  // The siblings whose names belong to saves of this location; sorted.
  std::vector<Sibling> find() const;
  // Whether its save is under way.
  bool is_alive(const Sibling& sibling) const;
  std::string holder(const Sibling& sibling) const;  // lock_holder() of its lock
  uint64_t size_of(const Sibling& sibling) const;    // total bytes of its files
  // Removes a sibling; false if its save is under way. Syncs the parent first: after a crash, an
  // exchange that is not durable could put the removed directory back into place.
  bool remove_dead(const Sibling& sibling) const;
  // The same for a sibling that could not be removed under its lock, which the caller has released.
  // Waits up to two seconds if a directory is not empty.
  bool remove_unlocked(const Sibling& sibling) const;

 private:
  std::optional<StorageEntry> entry_;
};

// Removes the directories that dead saves of the location have left beside it, except `own`, which
// is the caller's. Failures are logged. Error(kAlreadyExists) where a save is under way there.
void clean_siblings(Storage& location, std::string_view own = "");

// A save in files with fixed names needs directories, unless nothing stands at the location and the
// format's data files have names of their own or one writer. Error(kUnsupported), with a hint.
void expect_directories(Storage& location, const SaveTerms& terms, bool is_empty);

// Checks that replacing the directory, in which this stands, would remove no foreign file.
// Error(kUnsupported), naming one of the files, where some belong neither to a checkpoint nor to a
// save that failed there, or where that can't be determined. `remains_of`: null, or the new
// checkpoint's dialect; then the files of a stock save that did not get as far as the dialect's
// mark (metadata.json) are accepted too: common.pt, .metadata.tmp and data files with stock names.
void expect_only_checkpoint(Storage& location, const Standing& here, const Dialect* remains_of);

// The sibling of a save, opened by a rank. `name`: as the coordinator sent it.
// Throws fail_elsewhere() where it does not exist.
std::shared_ptr<Storage> sibling_storage(Storage& location, const std::string& name);
// For a rank that is about to write to the location: throws fail_elsewhere() where rank 0 has not
// begun this save. Otherwise the rank would make a directory of its own.
void expect_begun_here(Storage& location, const std::string& save_id, const Deadline& deadline);
// A rank does not find what rank 0 has made at the location: Error(kIo). `file`: the name that is
// missing.
[[noreturn]] void fail_elsewhere(const Storage& location, const std::string& file);

// The coordinator's part of a save in a sibling. Holds the lock of the directory, and the lock of
// the location unless that is empty, from begin() until it is destroyed.
class NewSibling {
 public:
  // Error(kUnsupported) where the location has no parent.
  NewSibling(std::shared_ptr<Storage> location, std::string_view save_id);

  const std::string& name() const { return name_; }  // in the parent
  const std::shared_ptr<Storage>& storage() const { return storage_; }

  // Makes the directory. Error(kAlreadyExists) where another save is under way; kUnsupported where
  // the location is not empty and the storage can't exchange directories.
  void begin();
  // Moves the directory, whose files must all be durable, to the location. Durable when it returns.
  // On errors that say that nothing was changed (kUnsupported, kAlreadyExists, kNotFound), removes
  // the directory.
  void publish();
  // Instead of publish(): moves a file or folder of the directory to the location, whose content
  // must be durable. Durable when it returns. Then, and after a failure, the caller abandons.
  void publish_part(const std::string& made, bool is_folder);
  // The same of a folder, which replaces the folder that is there by then, if any.
  void publish_over(const std::string& made);
  // Removes the replaced directory. Failures are logged.
  void clean();
  // To be called instead of publish(): removes the directory, and what else the save has made.
  // Failures are logged.
  void abandon();

 private:
  void make_and_lock();
  void copy_permissions();
  bool moves_again();
  bool moves_back();
  // Removes the directory `name_`, of which `lock` is the lock. Failures are logged.
  void remove(std::unique_ptr<StorageClaim>& lock);

  std::shared_ptr<Storage> location_;
  StorageEntry entry_;
  std::string save_id_;
  std::string name_;
  std::shared_ptr<Storage> storage_;
  std::unique_ptr<StorageClaim> lock_, location_lock_;
  bool exchanges_ = false;     // false: the location is absent or empty
  MadeDirectories made_;       // above the directory, and the location's, which is renamed to
  bool makes_own_ = false;     // the location had no kTilestoneDirectory, which its lock needs
  bool is_uncertain_ = false;  // what the directory holds may stand, or not be replaced durably
};

}  // namespace tilestone::engine
