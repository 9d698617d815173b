// Computes what part of a memory storage would survive a power loss.
//
// The journal keeps two snapshots of the names, the current one and the durable one, and the list
// of changes between them. Directories are numbers, so a renamed or exchanged directory keeps its
// entries, durable or not. Files are shared with the memory storage, so a file that lost its name
// can come back with an older snapshot. No bytes are copied before surviving_image.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone {

// Not thread-safe: the caller serialises all calls.
class FaultJournal {
 public:
  explicit FaultJournal(const MemoryStorage& storage);

  void created(const std::string& name, std::shared_ptr<MemoryFile> file);
  void renamed(const std::string& from, const std::string& to);  // a file or a directory
  void exchanged(const std::string& a, const std::string& b);
  void removed(const std::string& name);         // a file or a directory
  void made_directory(const std::string& name);  // and its parents
  void synced(const std::shared_ptr<MemoryFile>& file);
  void synced_directory(const std::string& name);

  FileImage surviving_image(Survival survival, uint64_t seed) const;

 private:
  // What a name refers to: a file, a directory, or nothing if neither is set.
  struct Target {
    std::shared_ptr<MemoryFile> file;
    uint64_t directory = 0;
  };
  using Entry = std::pair<uint64_t, std::string>;  // a directory, and a name in it
  struct Edit {
    Entry entry;
    Target target;
  };
  using Change = std::vector<Edit>;  // becomes durable completely or not at all
  using Picture = std::map<Entry, Target>;

  static void apply(Picture& picture, const Change& change);
  static std::map<std::string, std::shared_ptr<MemoryFile>> files_of(const Picture& picture);
  uint64_t directory(std::string_view name) const;  // the current number; 0 if not a directory
  Entry entry(const std::string& name) const;
  Target target(const Entry& entry) const;
  void change(Change change);

  Picture now_, durable_;
  uint64_t directories_ = 0;     // the last number given to a directory; the root is 0
  std::vector<Change> pending_;  // changes that are not durable, oldest first
  std::unordered_map<std::shared_ptr<MemoryFile>, uint64_t> synced_bytes_;
};

}  // namespace tilestone
