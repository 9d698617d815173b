// A storage of files in memory, for tests. The fault storage wraps it. Files are objects that can
// outlive their names, so that a replaced name can come back after a simulated power loss.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/file_image.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

struct MemoryFile {
  mutable std::mutex mutex;
  Bytes data;

  uint64_t size() const {
    std::lock_guard lock(mutex);
    return data.size();
  }
};

class MemoryStorage : public Storage {
 public:
  using Entries = std::map<std::string, std::shared_ptr<MemoryFile>>;

  explicit MemoryStorage(FileImage initial);

  bool can(StorageCapability what) override;
  std::string describe() const override { return "memory"; }
  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size) override;
  std::unique_ptr<ReadableFile> open(const std::string& name) override;
  void read(std::span<const ReadOp> ops, const ReadOptions& options, const ReadDone& done) override;
  std::optional<FileInfo> stat(const std::string& name) override;
  std::vector<std::string> list(const std::string& prefix) override;
  std::vector<std::string> list_directories(const std::string& prefix) override;
  void rename(const std::string& from, const std::string& to, bool replace) override;
  void remove(const std::string& name) override;
  void make_directory(const std::string& name) override;
  void remove_directory(const std::string& name) override;
  void exchange_directories(const std::string& a, const std::string& b) override;
  void rename_directory(const std::string& from, const std::string& to) override;
  void sync_directory(const std::string& name) override;
  std::unique_ptr<StorageLock> try_lock(const std::string& name) override;
  bool is_locked(const std::string& name) override;

  Entries entries() const;
  std::set<std::string> directories() const;
  std::shared_ptr<MemoryFile> find(const std::string& name) const;  // null: does not exist

 private:
  class Lock;
  // The caller of these functions must hold mutex_.
  void expect_parent(const std::string& name) const;
  void expect_no_directory(const std::string& name) const;
  void expect_directory(const std::string& name, const std::string& what) const;
  bool is_empty(const std::string& directory) const;
  // take removes a directory and returns its contents, with names relative to it. put inserts them.
  struct Tree;
  Tree take(const std::string& directory);
  void put(const std::string& directory, Tree tree);

  mutable std::mutex mutex_;
  Entries entries_;
  std::set<std::string> directories_;  // without the root
  std::set<std::string> locks_;
};

// A storage of files in memory. The files exist as long as the object. Everything counts as durable
// at once.
std::shared_ptr<Storage> memory_storage(FileImage initial = {});

// A copy of the files. Error(kInvalidArgument) for any other kind of storage.
FileImage memory_image(Storage& storage);

}  // namespace tilestone
