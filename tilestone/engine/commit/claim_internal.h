// The claim of a save on its location: the lock, and the directories that are made for it. The
// claim of a rank or a publisher, which shows that its process is at work.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// For what has no deadline of its own. A lease shows within less whether its holder lives.
inline constexpr std::chrono::seconds kClaimPatience{60};

// Takes the lock of the location, which a save or a gc holds. Null if another process holds it.
// Makes kTilestoneDirectory. The locked file is the one that is at the location when the call
// returns, even if a save has exchanged the directory meanwhile (Storage::claim).
std::unique_ptr<StorageClaim> claim_location(
    Storage& storage, const Deadline& patience = Deadline::after(kClaimPatience));
// The same; nullopt, which is logged, where the storage has no locks.
std::optional<std::unique_ptr<StorageClaim>> lock_if_possible(
    Storage& location, const Deadline& patience = Deadline::after(kClaimPatience));
// Whether it was taken, and is not lost (StorageClaim::held_until()). Null: it is not.
bool is_held(StorageClaim* lock);
// Releases the lock and removes its file. A lease's goes only if it is still the caller's.
void remove_claim(Storage& location, std::unique_ptr<StorageClaim>& lock);
// Whether the location's kTilestoneDirectory holds nothing but the lock.
bool has_only_lock(Storage& location);
// Releases the lock of the location and removes kTilestoneDirectory, if nothing else is in it. For
// a save that has made it and has failed; without a lock (null), if it is empty. Failures are
// logged; the lock may then still be held.
void remove_lock_directory(Storage& location, std::unique_ptr<StorageClaim>& lock);
// ", by process 1 on node7 since DATE" for a locked file; "" if the storage does not know it.
std::string lock_holder(Storage& storage, const std::string& lock = std::string(kLockName));

// The directories that a save will make: that of the location and those above it.
class MadeDirectories {
 public:
  MadeDirectories() = default;
  explicit MadeDirectories(Storage& location);  // looks which of them are missing
  size_t size() const { return missing_.size(); }
  // Removes those that are empty, the innermost first. Failures are logged.
  void remove() const noexcept;

 private:
  std::vector<StorageEntry> missing_;  // the innermost first
};

class Claim {
 public:
  // Makes the location's directory and kTilestoneDirectory and takes the lock. Where the storage
  // has no locks, logs that. `is_fresh`: kTilestoneDirectory is not known to exist.
  // Error(kAlreadyExists) where another process holds the lock.
  void take(Storage& location, bool is_fresh, const Deadline& deadline);
  // False: the storage has no locks, or the claim is lost, so others may be at work at the
  // location.
  bool is_held() const { return engine::is_held(lock_.get()); }
  bool is_lost() const { return lock_ != nullptr && !is_held(); }
  // The deadline of a call that only the holder may make. Error(kIo) if the claim is lost.
  Deadline while_held(Storage& location, const Deadline& deadline) const;
  // For a save that has failed: removes what was made, where nothing else is in it.
  void give_up(Storage& location);

 private:
  std::unique_ptr<StorageClaim> lock_;
  MadeDirectories made_;
  bool makes_own_ = false;  // kTilestoneDirectory
};

// ---- Signs of life

// The claim of a process on a part of a save: a lock of a file, which ends with the process. Where
// files can't be locked, or somebody else has the claim, this is empty.
class WorkClaim {
 public:
  WorkClaim(std::shared_ptr<Storage> storage, std::string name)
      : storage_(std::move(storage)), name_(std::move(name)) {
    try {
      lock_ = storage_->claim(name_, Deadline::after(std::chrono::seconds(0)));
    } catch (const Error& error) {
      log(LogLevel::kDebug, std::string("a save can't show that it works: ") + error.what());
      if (error.code() == ErrorCode::kUnsupported) remove_files(*storage_, std::vector{name_});
    }
  }
  ~WorkClaim() {
    const bool is_file = lock_ != nullptr && !storage_->facts().claims_are_leases();
    if (is_file) remove_files(*storage_, std::vector{name_});
  }
  WorkClaim(const WorkClaim&) = delete;
  WorkClaim& operator=(const WorkClaim&) = delete;

  bool is_held() const { return lock_ != nullptr; }

 private:
  const std::shared_ptr<Storage> storage_;
  const std::string name_;
  std::unique_ptr<StorageClaim> lock_;
};

// Whether a process has the claim. False where that can't be known.
inline bool is_claimed(Storage& storage, const std::string& name) {
  try {
    return storage.is_claimed(name);
  } catch (const Error&) {
    return false;
  }
}

}  // namespace tilestone::engine
