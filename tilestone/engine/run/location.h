// Where a checkpoint is, or where one is saved.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// A directory of a file system, or any storage. One location holds one checkpoint. The path of a
// safetensors file is a location for reading that has only this file.
//
// A path is checked when the location is first used. Constructing a Location from a bad path
// therefore never fails; the save or load fails instead, and reports the error to all ranks. A
// relative path is resolved against the working directory at that moment. A leading "~" or "~user"
// is the user's home directory, as in a shell ($HOME, else the system's user database). Errors at
// first use: kUnsupported for a URL ("s3://bucket/x", and "s3:/bucket/x", which pathlib makes of
// it); kInvalidArgument for a path that is empty or contains NUL, and for an unknown home
// directory. "./~" and "./s3:/x" name directories that are literally called so.
//
// Copies of a Location share the storage. Thread-safe.
class Location {
 public:
  Location(const char* path) : Location(std::string(path)) {}
  Location(const std::string& path, const PosixOptions& options = {});
  Location(const std::filesystem::path& path) : Location(path.string()) {}
  Location(std::shared_ptr<Storage> storage);

  Storage& storage() const { return *shared(); }
  const std::shared_ptr<Storage>& shared() const;
  // The absolute path, or how the storage describes itself.
  std::string describe() const { return storage().describe(); }
  // The text that must be equal on every rank of a save or load: the absolute path, lexically
  // normal (symbolic links are not followed), or how the storage describes itself.
  std::string identity() const;
  // identity() with symbolic links followed as far as directories exist: the same for each path
  // that leads to one directory.
  std::string resolved_identity() const;
  // identity(), or "" where that fails: using the location then reports the error.
  std::string place() const noexcept;
  // A directory within this location, by its name. A path is continued, so that the directory may
  // be a symbolic link; of a storage it is the child.
  Location within(const std::string& name) const;
  // The same location, where files are read through any symbolic link that leads out of the
  // directory (Reading::follow_links). A location made from a storage is returned as it is.
  Location following_links() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tilestone
