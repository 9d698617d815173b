// The claim of a process on a part of a save: a lock of a file, which ends with the process.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Where files can't be locked, or somebody else has the claim, this is empty.
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
