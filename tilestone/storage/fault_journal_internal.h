// What of a storage in memory would survive a power loss.
//
// Two pictures are kept: the names and lengths that are durable, and the list of changes of names
// that are not yet. Files are the memory storage's own objects, shared, so that a file that lost
// its name can come back with an older picture; no bytes are copied before surviving_image.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "tilestone/storage/fault_storage.h"
#include "tilestone/storage/memory_internal.h"

namespace tilestone {

// The caller serialises all calls.
class FaultJournal {
 public:
  explicit FaultJournal(const MemoryStorage& storage);

  void created(const std::string& name, std::shared_ptr<MemoryFile> file);
  void renamed(const std::string& from, const std::string& to, std::shared_ptr<MemoryFile> file);
  void removed(const std::string& name);
  void made_directory(const std::string& name);  // and its parents
  void synced(const std::shared_ptr<MemoryFile>& file);
  void synced_directory(const std::string& name);

  FileImage surviving_image(Survival survival, uint64_t seed) const;

 private:
  // One change of names, durable as a whole or not at all. `gone` goes, then `name` is `file`;
  // either may be empty. A directory is a name without a file.
  struct Change {
    std::string gone;
    std::string name;
    std::shared_ptr<MemoryFile> file;
  };
  struct Picture {
    std::map<std::string, std::shared_ptr<MemoryFile>> files;
    std::set<std::string> directories;
    void apply(const Change& change);
    bool reachable(const std::string& name) const;  // all its directories are there
  };
  static bool touches(const Change& change, std::string_view directory);

  std::set<std::string> made_directories_;  // durable or not
  Picture durable_;
  std::vector<Change> pending_;  // in the order in which they were made
  std::unordered_map<std::shared_ptr<MemoryFile>, uint64_t> synced_bytes_;
};

}  // namespace tilestone
