#include "tilestone/storage/child_storage_testing.h"

#include <algorithm>

#include "tilestone/storage/directories.h"
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
  void append_kept(ByteView bytes, std::optional<uint32_t> crc32) override {
    file_->append_kept(bytes, crc32);
  }
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

// The directories of the base storage under the child's names.
class ChildDirectories : public Directories {
 public:
  ChildDirectories(std::shared_ptr<Storage> base, std::string directory)
      : base_(std::move(base)), directory_(std::move(directory)) {}

  void make(const std::string& name) override {
    check_directory_name(name);
    make_root();
    if (!name.empty()) of_base().make(full(name));
  }
  void remove(const std::string& name) override { of_base().remove(full(name)); }
  void settle(const std::string& name) override {
    of_base().settle(name.empty() ? directory_ : full(name));
  }
  bool can_exchange() override { return of_base().can_exchange(); }
  void exchange(const std::string& a, const std::string& b) override {
    of_base().exchange(full(a), full(b));
  }
  void rename(const std::string& from, const std::string& to) override {
    of_base().rename(full(from), full(to));
  }
  void rename_file(const std::string& from, const std::string& to, bool replace) override {
    of_base().rename_file(full(from), full(to), replace);
  }
  void copy_permissions(const std::string& name, const std::string& like) override {
    of_base().copy_permissions(full(name), full(like));
  }
  std::optional<StorageEntry> parent() override {
    const auto [above, last] = split_name(directory_);
    return StorageEntry{above.empty() ? base_ : base_->child(std::string(above)),
                        std::string(last)};
  }

  // Makes the root and the directories above it, durably, as make() promises.
  void make_root() {
    for (size_t end = 0; end < directory_.size(); ++end) {
      end = std::min(directory_.find('/', end), directory_.size());
      const std::string part = directory_.substr(0, end);
      const auto info = base_->stat(part);
      if (info && !info->regular) continue;
      of_base().make(part);
      base_->settle(std::string(parent_name(part)));
    }
  }

 private:
  Directories& of_base() { return *base_->directories(); }
  std::string full(const std::string& name) const {
    check_file_name(name);
    return directory_ + "/" + name;
  }

  std::shared_ptr<Storage> base_;
  std::string directory_;
};

class ChildStorage : public Storage {
 public:
  ChildStorage(std::shared_ptr<Storage> base, std::string directory)
      : base_(base), directory_(directory), directories_(std::move(base), std::move(directory)) {}

  StorageFacts facts() const override {
    StorageFacts facts = base_->facts();
    facts.description += "/" + directory_;
    uint64_t& most = facts.max_name_bytes;
    if (most != UINT64_MAX) most -= std::min(most, directory_.size() + 1);
    if (facts.directories != nullptr) facts.directories = &directories_;
    return facts;
  }

  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size,
                                       const Deadline& deadline) override {
    const std::string full = file(name);
    make_root();
    return std::make_unique<ChildWritable>(name, base_->create(full, expected_size, deadline));
  }
  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    return std::make_unique<ChildReadable>(name, base_->open(file(name)));
  }
  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    base_->read(of_base(ops), options, done);
  }

  std::optional<FileInfo> stat(const std::string& name) override { return base_->stat(file(name)); }
  Listing listing(const std::string& prefix, Depth depth) override {
    Listing found = base_->listing(directory_ + "/" + prefix, depth);
    for (std::string& name : found.files) name.erase(0, directory_.size() + 1);
    for (std::string& name : found.directories) name.erase(0, directory_.size() + 1);
    return found;
  }
  std::optional<std::string> put_for_tag(const std::string& name, ByteView bytes,
                                         const Condition& condition, const std::string& scratch,
                                         Deadline deadline) override {
    const std::string full = file(name);
    make_root();
    return base_->put_for_tag(full, bytes, condition, file(scratch), deadline);
  }
  bool remove_files(std::span<const std::string> names, const FileRemoval& how) override {
    std::vector<std::string> full;
    for (const std::string& name : names) full.push_back(file(name));
    return base_->remove_files(full, how);
  }

  bool link(const StorageEntry& from, const std::string& name, const Deadline& deadline) override {
    const std::string full = file(name);
    make_root();
    return base_->link(from, full, deadline);
  }

  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline& patience) override {
    const std::string full = file(name);
    make_root();
    return base_->claim(full, patience);
  }
  bool is_claimed(const std::string& name) override { return base_->is_claimed(file(name)); }

  std::shared_ptr<Storage> view(const std::string& directory,
                                const std::optional<Deadline>& deadline) override {
    if (!directory.empty()) return base_->view(file(directory), deadline);
    return child_storage(base_->view("", deadline), directory_);
  }

  StorageEntry in_base(const std::string& name) const { return {base_, file(name)}; }

 private:
  std::string file(const std::string& name) const {
    check_file_name(name);
    return directory_ + "/" + name;
  }

  static std::vector<ReadOp> of_base(std::span<const ReadOp> ops) {
    std::vector<ReadOp> translated(ops.begin(), ops.end());
    for (ReadOp& op : translated) {
      const auto* const own = dynamic_cast<const ChildReadable*>(op.file);
      if (own != nullptr) op.file = own->file();  // else the base refuses the foreign file
    }
    return translated;
  }

  void make_root() {
    if (directories() != nullptr) directories_.make_root();
  }

  std::shared_ptr<Storage> base_;
  std::string directory_;
  mutable ChildDirectories directories_;
};

}  // namespace

std::shared_ptr<Storage> child_storage(std::shared_ptr<Storage> base, const std::string& name) {
  check_file_name(name);
  return std::make_shared<ChildStorage>(std::move(base), name);
}

StorageEntry without_children(StorageEntry entry) {
  while (const auto* const child = dynamic_cast<const ChildStorage*>(entry.storage.get())) {
    entry = child->in_base(entry.name);
  }
  return entry;
}

}  // namespace tilestone
