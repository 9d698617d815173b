#include "tilestone/storage/child_storage_internal.h"

#include <algorithm>

#include "tilestone/storage/names_internal.h"

namespace tilestone {
namespace {

// A file of the base storage under the child's name.
class ChildWritable : public WritableFile {
 public:
  ChildWritable(std::string name, std::unique_ptr<WritableFile> file)
      : name_(std::move(name)), file_(std::move(file)) {}

  void append(Buffer buffer) override { file_->append(std::move(buffer)); }
  void append(ByteView bytes) override { file_->append(bytes); }
  void append_kept(ByteView bytes) override { file_->append_kept(bytes); }
  void sync(Deadline deadline) override { file_->sync(deadline); }
  void close() override { file_->close(); }
  uint64_t size() const override { return file_->size(); }
  const std::string& name() const override { return name_; }

 private:
  std::string name_;
  std::unique_ptr<WritableFile> file_;
};

class ChildReadable : public ReadableFile {
 public:
  ChildReadable(std::string name, std::unique_ptr<ReadableFile> file)
      : name_(std::move(name)), file_(std::move(file)) {}

  uint64_t size() const override { return file_->size(); }
  const std::string& name() const override { return name_; }
  const ReadableFile* file() const { return file_.get(); }

 private:
  std::string name_;
  std::unique_ptr<ReadableFile> file_;
};

class ChildStorage : public Storage {
 public:
  ChildStorage(std::shared_ptr<Storage> base, std::string directory)
      : base_(std::move(base)), directory_(std::move(directory)) {}

  bool can(StorageCapability what) override { return base_->can(what); }
  ReadCosts read_costs() const override { return base_->read_costs(); }
  uint64_t available_cache() override { return base_->available_cache(); }
  std::string describe() const override { return base_->describe() + "/" + directory_; }
  uint64_t max_name_bytes() const override {
    const uint64_t of_base = base_->max_name_bytes();
    return of_base == UINT64_MAX ? of_base : of_base - std::min(of_base, directory_.size() + 1);
  }

  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size) override {
    return std::make_unique<ChildWritable>(name, base_->create(file(name), expected_size));
  }
  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    return std::make_unique<ChildReadable>(name, base_->open(file(name)));
  }
  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    base_->read(of_base(ops), options, done);
  }
  uint64_t prefetch(std::span<const ReadOp> ops, const ReadOptions& options) override {
    return base_->prefetch(of_base(ops), options);
  }

  std::optional<FileInfo> stat(const std::string& name) override { return base_->stat(file(name)); }
  std::vector<std::string> list(const std::string& prefix) override {
    return relative_names(base_->list(directory_ + "/" + prefix));
  }
  std::vector<std::string> list_files(const std::string& prefix) override {
    return relative_names(base_->list_files(directory_ + "/" + prefix));
  }
  std::vector<std::string> list_directories(const std::string& prefix) override {
    return relative_names(base_->list_directories(directory_ + "/" + prefix));
  }
  void rename(const std::string& from, const std::string& to, bool replace) override {
    base_->rename(file(from), file(to), replace);
  }
  void copy_permissions(const std::string& name, const std::string& like) override {
    base_->copy_permissions(file(name), file(like));
  }
  void prepare_publish(const std::string& temp_name, ByteView bytes, Deadline deadline) override {
    base_->prepare_publish(file(temp_name), bytes, deadline);
  }
  void publish_prepared(const std::string& name, const std::string& temp_name, ByteView bytes,
                        bool replace, Deadline deadline) override {
    base_->publish_prepared(file(name), file(temp_name), bytes, replace, deadline);
  }
  void remove(const std::string& name) override { base_->remove(file(name)); }

  void make_directory(const std::string& name) override {
    check_directory_name(name);
    make_root();
    if (!name.empty()) base_->make_directory(file(name));
  }
  void remove_directory(const std::string& name) override { base_->remove_directory(file(name)); }
  void exchange_directories(const std::string& a, const std::string& b) override {
    base_->exchange_directories(file(a), file(b));
  }
  void rename_directory(const std::string& from, const std::string& to) override {
    base_->rename_directory(file(from), file(to));
  }
  void sync_directory(const std::string& name) override {
    check_directory_name(name);
    base_->sync_directory(name.empty() ? directory_ : file(name));
  }

  std::unique_ptr<StorageLock> try_lock(const std::string& name) override {
    return base_->try_lock(file(name));
  }
  bool is_locked(const std::string& name) override { return base_->is_locked(file(name)); }

  std::shared_ptr<Storage> child(const std::string& name) override {
    return base_->child(file(name));
  }
  std::optional<StorageEntry> parent() override {
    const auto [above, last] = split_name(directory_);
    return StorageEntry{above.empty() ? base_ : base_->child(std::string(above)),
                        std::string(last)};
  }

 private:
  std::string file(const std::string& name) const {
    check_file_name(name);
    return directory_ + "/" + name;
  }

  std::vector<std::string> relative_names(std::vector<std::string> names) const {
    for (std::string& name : names) name.erase(0, directory_.size() + 1);
    return names;
  }

  static std::vector<ReadOp> of_base(std::span<const ReadOp> ops) {
    std::vector<ReadOp> translated(ops.begin(), ops.end());
    for (ReadOp& op : translated) {
      const auto* const own = dynamic_cast<const ChildReadable*>(op.file);
      if (own != nullptr) op.file = own->file();  // else the base refuses the foreign file
    }
    return translated;
  }

  // Makes the root and the directories above it, durably, as make_directory promises.
  void make_root() {
    for (size_t end = 0; end < directory_.size(); ++end) {
      end = std::min(directory_.find('/', end), directory_.size());
      const std::string part = directory_.substr(0, end);
      const auto info = base_->stat(part);
      if (info && !info->regular) continue;
      base_->make_directory(part);
      base_->sync_directory(std::string(parent_name(part)));
    }
  }

  std::shared_ptr<Storage> base_;
  std::string directory_;
};

}  // namespace

std::shared_ptr<Storage> child_storage(std::shared_ptr<Storage> base, const std::string& name) {
  check_file_name(name);
  return std::make_shared<ChildStorage>(std::move(base), name);
}

}  // namespace tilestone
