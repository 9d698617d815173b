// Saves whose files can't be switched by one rename: the whole checkpoint is made in a directory
// beside its location, ".NAME.tilestone-SAVE_ID", and put into its place in one step. The protocol
// stands in commit.cc.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/format/format.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The lock that a save of this location, or a cleaning, holds; null where somebody else does. Makes
// kOwnDirectory. A directory that was exchanged for another before the lock was taken counts as
// somebody else's: what is locked is what stands at the location when the call returns.
std::unique_ptr<StorageLock> try_lock_location(Storage& storage);
// Error(kAlreadyExists): another save to the location is under way.
[[noreturn]] void fail_under_way(const Storage& storage, std::string_view what = "another save");

// A directory that a save has made beside its location, or the checkpoint that it has replaced.
struct Sibling {
  std::string name;  // in the parent
  std::string save_id;
};

// The siblings of a location. Everything is empty where the location has no parent.
class Siblings {
 public:
  explicit Siblings(Storage& location);

  // Of names that only saves of this location give; sorted.
  std::vector<Sibling> find() const;
  // Whether its save is under way.
  bool is_alive(const Sibling& sibling) const;
  uint64_t size_of(const Sibling& sibling) const;  // bytes of its files
  // False where its save is under way. What the parent shows is made durable first, so that nothing
  // goes to which an exchange could be taken back.
  bool remove_dead(const Sibling& sibling) const;

 private:
  std::optional<StoragePlace> place_;
};

// Removes what dead saves of the location have left beside it; failures are reported in the log.
// Error(kAlreadyExists) where a save is under way there. `own`: the sibling of the caller.
void clean_siblings(Storage& location, std::string_view own = "");

// Error(kUnsupported) naming one of the files, where the location holds some that belong to no
// checkpoint and to no save that failed there, or where that can't be known: replacing the
// directory would remove them. `format`: of the new checkpoint. `or_remains`: what stock
// Megatron-Core leaves of a save that it did not finish is no reason to refuse either: common.pt
// and data files of its names, where no metadata.json says that there was a checkpoint.
void expect_only_checkpoint(Storage& location, const std::shared_ptr<const Format>& format,
                            bool or_remains);

// The directory beside the location in which its save's files are written, as a rank sees it.
// Error(kMismatch) where it is not there: the rank's path leads to another directory.
std::shared_ptr<Storage> staging_storage(Storage& location, const std::string& name);

// The coordinator's part. Holds the locks of the directory and of what stands at the location from
// begin() until it goes.
class Staging {
 public:
  // Error(kUnsupported) where the location has no parent.
  Staging(std::shared_ptr<Storage> location, std::string_view save_id);

  const std::string& name() const { return name_; }  // in the parent
  const std::shared_ptr<Storage>& storage() const { return storage_; }

  // Makes the directory. Error(kAlreadyExists) where another save is under way; kUnsupported where
  // something stands at the location and the storage can't exchange directories.
  void begin();
  // Puts the directory, in which all is durable, in the location's place; durable when it returns.
  // Where nothing was changed (kUnsupported, kAlreadyExists, kNotFound) the directory is removed.
  void publish();
  // Removes what was replaced. Failures are reported in the log.
  void clean();
  // Instead of publish(): removes the directory. Failures are reported in the log.
  void abandon();

 private:
  std::shared_ptr<Storage> location_;
  StoragePlace place_;
  std::string name_;
  std::shared_ptr<Storage> storage_;
  std::unique_ptr<StorageLock> lock_, location_lock_;
  bool exchanges_ = false;  // otherwise nothing stands at the location
};

}  // namespace tilestone::engine
