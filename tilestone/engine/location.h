// Where a checkpoint is or shall be.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "tilestone/storage/storage.h"

namespace tilestone {

// A directory of the local file system, or any storage. One location holds one checkpoint.
class Location {
 public:
  Location(const char* path) : Location(std::string(path)) {}
  Location(const std::string& path);  // posix_storage with default options
  Location(const std::filesystem::path& path) : Location(path.string()) {}
  Location(std::shared_ptr<Storage> storage) : storage_(std::move(storage)) {}

  Storage& storage() const { return *storage_; }
  const std::shared_ptr<Storage>& shared() const { return storage_; }
  std::string describe() const { return storage_->describe(); }

 private:
  std::shared_ptr<Storage> storage_;
};

}  // namespace tilestone
