#include "tilestone/engine/commit/claim_internal.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/base/pause.h"
#include "tilestone/engine/commit/sibling_internal.h"

namespace tilestone::engine {
namespace {

constexpr int kMaxTries = 8;  // while saves that have failed remove what they made

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

// Anybody may have written the file, so only a short line in our form is shown.
std::string lock_holder(Storage& storage, const std::string& lock) {
  constexpr uint64_t kMostBytes = 400;
  try {
    if (!storage.is_claimed(lock)) return "";
    const Bytes bytes = read_file(storage, lock, kMostBytes);
    const std::string text(as_text(bytes));
    const bool is_line = std::all_of(text.begin(), text.end(),
                                     [](unsigned char c) { return c >= 0x20 && c != 0x7F; });
    return is_line && text.starts_with("process ") ? ", by " + text : "";
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("who holds a lock is not known: ") + error.what());
    return "";
  }
}

std::unique_ptr<StorageClaim> claim_location(Storage& storage, const Deadline& patience) {
  return storage.claim(std::string(kLockName), patience);
}

std::optional<std::unique_ptr<StorageClaim>> lock_if_possible(Storage& location,
                                                              const Deadline& patience) {
  try {
    return claim_location(location, patience);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    log(LogLevel::kWarning,
        std::string("the location can't be locked, so nothing keeps two saves apart that replace a "
                    "checkpoint, and files that failed saves have left stay: ") +
            error.what());
    return std::nullopt;
  }
}

bool is_held(StorageClaim* lock) {
  constexpr std::chrono::seconds kToRenew{5};
  return lock != nullptr && !lock->held_until(Deadline::after(kToRenew)).expired();
}

void remove_claim(Storage& location, std::unique_ptr<StorageClaim>& lock) {
  if (!location.facts().claims_are_leases()) location.remove(std::string(kLockName));
  lock.reset();
}

bool has_only_lock(Storage& location) {
  const Listing own = location.listing(std::string(kTilestoneDirectory) + "/", Depth::kLevel);
  return own.directories.empty() &&
         std::ranges::all_of(own.files, [](const std::string& name) { return name == kLockName; });
}

// The file of the lock goes first, under the lock: who waits for it then sees that its file has no
// name (Storage::claim()). That of a lease goes with it. The directory goes only if it is empty,
// because saves by files take no lock.
void remove_lock_directory(Storage& location, std::unique_ptr<StorageClaim>& lock) {
  or_log(LogLevel::kDebug, "the lock of a failed save stays", [&] {
    if (lock != nullptr) {
      if (!has_only_lock(location)) return;
      remove_claim(location, lock);
    }
    location.tidy(std::string(kTilestoneDirectory));
  });
}

MadeDirectories::MadeDirectories(Storage& location) {
  try {
    for (auto entry = location.parent(); entry; entry = entry->storage->parent()) {
      if (entry->storage->stat(entry->name)) return;
      missing_.push_back(*entry);
    }
  } catch (const Error& error) {
    missing_.clear();
    log(LogLevel::kDebug, std::string("which directories a save makes: ") + error.what());
  }
}

void MadeDirectories::remove() const noexcept {
  for (const StorageEntry& entry : missing_) entry.storage->tidy(entry.name);
}

// Meanwhile the pruning of a run may remove the directory: while it is empty, it is what a killed
// save has left. (step_removal.cc)
void Claim::take(Storage& location, bool is_fresh, const Deadline& deadline) {
  makes_own_ = is_fresh;
  for (int tries = 1;; ++tries) {
    try {
      if (MadeDirectories made(location); made.size() > made_.size()) made_ = std::move(made);
      auto lock = lock_if_possible(location, deadline);
      if (lock && *lock == nullptr) {
        if (tries == kMaxTries || !is_being_removed(location, deadline)) fail_under_way(location);
        continue;
      }
      if (lock) lock_ = *std::move(lock);
      return;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNotFound || tries == kMaxTries) throw;
    }
  }
}

Deadline Claim::while_held(Storage& location, const Deadline& deadline) const {
  if (lock_ == nullptr) return deadline;
  const Deadline until = lock_->held_until(deadline);
  if (until.expired()) {
    throw Error(ErrorCode::kIo, "this save has lost its claim on " + location.describe() +
                                    ": it could not be renewed in time, so another save may have "
                                    "begun there")
        .with_hint("save once more");
  }
  return until.when() < deadline.when() ? until.with_interrupt(deadline.interrupt()) : deadline;
}

void Claim::give_up(Storage& location) {
  if (makes_own_) remove_lock_directory(location, lock_);
  made_.remove();
}

}  // namespace tilestone::engine
