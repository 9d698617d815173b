// Storages in memory, for tests: one of files in directories, and one of objects. The fault storage
// wraps them. Files are objects that can outlive their names, so that a replaced name can come back
// after a simulated power loss.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/file_image.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

struct MemoryFile {
  mutable std::mutex mutex;
  Bytes data;
  const std::chrono::steady_clock::time_point made = std::chrono::steady_clock::now();

  uint64_t size() const {
    std::lock_guard lock(mutex);
    return data.size();
  }
};

class MemoryStorage : public Storage {
 public:
  using Entries = std::map<std::string, std::shared_ptr<MemoryFile>>;

  explicit MemoryStorage(FileImage initial);

  // As a disk's, whose cache is all of it.
  StorageFacts facts() const override {
    return {.description = "memory",
            .directories = own_directories_.get(),
            .has_folders = true,
            .renames = true,
            .page_cache = true};
  }
  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size,
                                       const Deadline& deadline) override;
  std::unique_ptr<ReadableFile> open(const std::string& name) override;
  void read(std::span<const ReadOp> ops, const ReadOptions& options, const ReadDone& done) override;
  std::optional<FileInfo> stat(const std::string& name) override;
  Listing listing(const std::string& prefix, Depth depth) override;
  bool remove_files(std::span<const std::string> names, const FileRemoval& how) override;
  bool link(const StorageEntry& from, const std::string& name, const Deadline& deadline) override;
  std::shared_ptr<Storage> view(const std::string& directory,
                                const std::optional<Deadline>& deadline) override;
  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline& patience) override;
  bool is_claimed(const std::string& name) override;

  Entries entries() const;
  std::set<std::string> directory_names() const;
  std::shared_ptr<MemoryFile> find(const std::string& name) const;  // null: does not exist

 protected:
  mutable std::mutex mutex_;
  Entries entries_;

 private:
  class Lock;
  class OwnDirectories;
  virtual void expect_readable(const std::string&, const MemoryFile&) const {}
  // The caller of these functions must hold mutex_.
  void expect_parent(const std::string& name) const;
  void make_directories(std::string_view name);
  void expect_no_directory(const std::string& name) const;
  void expect_directory(const std::string& name, const std::string& what) const;
  bool is_empty(const std::string& directory) const;
  // take removes a directory and returns its contents, with names relative to it. put_tree inserts
  // them.
  struct Tree;
  Tree take(const std::string& directory);
  void put_tree(const std::string& directory, Tree tree);

  std::set<std::string> directories_;  // without the root
  std::unique_ptr<Directories> own_directories_;
  std::set<std::string> locks_;
};

// As an object store: names are flat, a file is there when it is complete, a put can ask for a tag,
// claims are leases.
class MemoryObjects : public MemoryStorage {
 public:
  static constexpr std::chrono::milliseconds kLeasePeriod{50};

  explicit MemoryObjects(FileImage initial);

  StorageFacts facts() const override;
  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size,
                                       const Deadline& deadline) override;
  std::optional<FileInfo> stat(const std::string& name) override;
  Listing listing(const std::string& prefix, Depth depth) override;
  std::optional<std::string> put_for_tag(const std::string& name, ByteView bytes,
                                         const Condition& condition, const std::string& scratch,
                                         Deadline deadline) override;
  bool remove_files(std::span<const std::string> names, const FileRemoval& how) override;
  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline& patience) override;
  bool is_claimed(const std::string& name) override;

 private:
  class Growing;
  void expect_readable(const std::string& name, const MemoryFile& file) const override;
};

// A storage of files in memory. The files exist as long as the object. Everything counts as durable
// at once.
std::shared_ptr<Storage> memory_storage(FileImage initial = {});
std::shared_ptr<Storage> memory_objects(FileImage initial = {});

// A copy of the files. Error(kInvalidArgument) for any other kind of storage.
FileImage memory_image(Storage& storage);

}  // namespace tilestone
