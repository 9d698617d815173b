// A storage over a directory of the file system that records its use: the number of calls, the
// size of the largest directory listed, and the times of renames.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/storage/directories.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/tilestone.h"

namespace tilestone::bench {

// Thread-safe. A publish counts as the calls of which it consists.
class CountingStorage : public Storage {
 public:
  using Clock = std::chrono::steady_clock;

  static std::shared_ptr<CountingStorage> over(const std::string& folder) {
    return std::make_shared<CountingStorage>(posix_storage(folder));
  }
  explicit CountingStorage(std::shared_ptr<Storage> inner) : inner_(std::move(inner)) {}

  uint64_t calls() const { return calls_; }
  uint64_t syncs() const { return syncs_; }              // of files and directories
  uint64_t most_listed() const { return most_listed_; }  // entries of one directory

  // The time of the last rename to a name with this suffix. Throws kNotFound if there was none.
  Clock::time_point renamed_to(std::string_view suffix) const {
    std::lock_guard lock(mutex_);
    for (auto entry = renames_.rbegin(); entry != renames_.rend(); ++entry) {
      if (entry->first.ends_with(suffix)) return entry->second;
    }
    throw Error(ErrorCode::kNotFound, "no file was renamed to *" + std::string(suffix));
  }

  StorageFacts facts() const override {
    StorageFacts facts = inner_->facts();
    facts.directories = &directories_;
    return facts;
  }

  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected,
                                       const Deadline& deadline) override {
    ++calls_;
    return std::make_unique<CountedFile>(*this, inner_->create(name, expected, deadline));
  }
  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    ++calls_;
    return inner_->open(name);
  }
  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    calls_ += ops.size();
    inner_->read(ops, options, done);
  }
  std::optional<FileInfo> stat(const std::string& name) override {
    ++calls_;
    return inner_->stat(name);
  }
  Listing listing(const std::string& prefix, Depth depth) override {
    const bool is_of_stores = depth == Depth::kAtOnce || depth == Depth::kUnfinished;
    if (is_of_stores && inner_->directories() != nullptr) return {};
    Listing found = inner_->listing(prefix, depth);
    count(prefix, found.files);
    return found;
  }
  bool remove_files(std::span<const std::string> names, const FileRemoval& how) override {
    calls_ += names.size();
    return inner_->remove_files(names, how);
  }
  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline& patience) override {
    ++calls_;
    return inner_->claim(name, patience);
  }
  bool is_claimed(const std::string& name) override {
    ++calls_;
    return inner_->is_claimed(name);
  }

 private:
  class CountedDirectories : public Directories {
   public:
    explicit CountedDirectories(CountingStorage& storage) : storage_(storage) {}
    void make(const std::string& name) override { inner().make(name); }
    void remove(const std::string& name) override { inner().remove(name); }
    void settle(const std::string& name) override {
      ++storage_.syncs_;
      inner().settle(name);
    }
    bool can_exchange() override { return inner().can_exchange(); }
    void exchange(const std::string& a, const std::string& b) override { inner().exchange(a, b); }
    void rename(const std::string& from, const std::string& to) override {
      inner().rename(from, to);
    }
    void rename_file(const std::string& from, const std::string& to, bool replace) override {
      inner().rename_file(from, to, replace);
      std::lock_guard lock(storage_.mutex_);
      storage_.renames_.emplace_back(to, Clock::now());
    }
    void copy_permissions(const std::string& name, const std::string& like) override {
      inner().copy_permissions(name, like);
    }
    std::optional<StorageEntry> parent() override { return inner().parent(); }

   private:
    Directories& inner() {
      ++storage_.calls_;
      return *storage_.inner_->directories();
    }
    CountingStorage& storage_;
  };

  class CountedFile : public WritableFile {
   public:
    CountedFile(CountingStorage& storage, std::unique_ptr<WritableFile> inner)
        : storage_(storage), inner_(std::move(inner)) {}
    void append(Buffer buffer) override {
      ++storage_.calls_;
      inner_->append(std::move(buffer));
    }
    void append(ByteView bytes) override {
      ++storage_.calls_;
      inner_->append(bytes);
    }
    void append_kept(ByteView bytes, std::optional<uint32_t> crc32) override {
      ++storage_.calls_;
      inner_->append_kept(bytes, crc32);
    }
    void sync(Deadline deadline) override {
      ++storage_.calls_;
      ++storage_.syncs_;
      inner_->sync(deadline);
    }
    void close() override {
      ++storage_.calls_;
      inner_->close();
    }
    uint64_t size() const override { return inner_->size(); }
    const std::string& name() const override { return inner_->name(); }

   private:
    CountingStorage& storage_;
    std::unique_ptr<WritableFile> inner_;
  };

  // Counts the entries of each listed directory. All entries of the first one are read, whatever
  // the names must begin with. `names` may be a listing of a whole subtree, which shows neither
  // empty directories nor those that contain only directories.
  void count(const std::string& prefix, const std::vector<std::string>& names) {
    ++calls_;
    const std::string directory = prefix.substr(0, prefix.rfind('/') + 1);
    const Listing level = inner_->listing(directory, Depth::kLevel);
    uint64_t most = level.files.size() + level.directories.size();
    std::map<std::string_view, uint64_t> entries;
    std::string_view before;
    for (const std::string_view name : names) {
      for (size_t slash = name.rfind('/');; slash = name.rfind('/', slash - 1)) {
        const bool top = slash == std::string_view::npos;
        ++entries[top ? std::string_view() : name.substr(0, slash)];
        // If the previous name is in this directory too, the directory is counted already.
        if (top || before.starts_with(name.substr(0, slash + 1))) break;
      }
      before = name;
    }
    for (const auto& [listed, count] : entries) most = std::max(most, count);
    for (uint64_t seen = most_listed_; seen < most;) {
      if (most_listed_.compare_exchange_weak(seen, most)) break;
    }
  }

  const std::shared_ptr<Storage> inner_;
  mutable CountedDirectories directories_{*this};
  std::atomic<uint64_t> calls_ = 0, syncs_ = 0, most_listed_ = 0;
  mutable std::mutex mutex_;
  std::vector<std::pair<std::string, Clock::time_point>> renames_;
};

}  // namespace tilestone::bench
