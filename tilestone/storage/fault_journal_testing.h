// What of a storage in memory would survive a power loss.
//
// Two pictures of the names are kept: the one that is there, and the durable one, with the list of
// changes between them. Directories are numbers, so that one that is renamed or exchanged takes
// along what is in it, durable or not. Files are the memory storage's own objects, shared, so that
// a file that lost its name can come back with an older picture; no bytes are copied before
// surviving_image.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tilestone/storage/fault_storage_testing.h"
#include "tilestone/storage/memory_internal.h"

namespace tilestone {

// The caller serialises all calls.
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
  // What a name stands for: a file, a directory, or (neither) nothing.
  struct Target {
    std::shared_ptr<MemoryFile> file;
    uint64_t directory = 0;
  };
  using Entry = std::pair<uint64_t, std::string>;  // a directory, and a name in it
  struct Edit {
    Entry entry;
    Target target;
  };
  using Change = std::vector<Edit>;  // durable as a whole or not at all
  using Picture = std::map<Entry, Target>;

  static void apply(Picture& picture, const Change& change);
  static std::map<std::string, std::shared_ptr<MemoryFile>> files_of(const Picture& picture);
  uint64_t directory(std::string_view name) const;  // as it is now
  Entry entry(const std::string& name) const;
  Target target(const Entry& entry) const;
  void change(Change change);

  Picture now_, durable_;
  uint64_t directories_ = 0;     // made so far; 0 is the root
  std::vector<Change> pending_;  // in the order in which they were made
  std::unordered_map<std::shared_ptr<MemoryFile>, uint64_t> synced_bytes_;
};

}  // namespace tilestone
