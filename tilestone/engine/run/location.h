// Where a checkpoint is or shall be.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// A directory of the local file system, or any storage. One location holds one checkpoint.
//
// A path is looked at when the location is first used, so making a Location never fails, and a bad
// path is an error of the save or load that all ranks hear of. A relative path is taken from the
// working directory of that moment; a leading "~" or "~user" is the user's home directory, as in a
// shell ($HOME, else the system's list of users). Errors of use: kUnsupported for a URL
// ("s3://bucket/x", and what pathlib makes of it, "s3:/bucket/x"); kInvalidArgument for a path that
// is empty or holds NUL, and for a home directory that is not known. "./~" and "./s3:/x" name
// directories that are really called so.
//
// Copies share the storage. Thread-safe.
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
  // What must be the same text on every rank of a save or load: the absolute path, lexically
  // normal (symbolic links are not followed), or how the storage describes itself.
  std::string identity() const;
  // The same, or "" where it has none: what is wrong is said when the location is used.
  std::string place() const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tilestone
