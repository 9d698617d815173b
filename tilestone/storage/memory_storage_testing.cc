#include "tilestone/storage/memory_storage_testing.h"

#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/storage/child_storage_testing.h"
#include "tilestone/storage/names_internal.h"
#include "tilestone/storage/read_only.h"
#include "tilestone/storage/read_ops_internal.h"

namespace tilestone {
namespace {

[[noreturn]] void fail(ErrorCode code, const std::string& name, const std::string& what,
                       int error) {
  throw Error(code, what).with_file(name).with_errno(error);
}

class MemoryWritable : public WritableFile {
 public:
  MemoryWritable(std::string name, std::shared_ptr<MemoryFile> file)
      : name_(std::move(name)), file_(std::move(file)) {}

  void append(Buffer buffer) override { append(buffer.view()); }
  void append(ByteView bytes) override {
    expect_open();
    std::lock_guard lock(file_->mutex);
    file_->data.insert(file_->data.end(), bytes.begin(), bytes.end());
    size_ += bytes.size();
  }
  void sync(Deadline deadline) override {
    expect_open();
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the deadline passed before a file was synced")
          .with_file(name_);
    }
  }
  void close() override {
    expect_open();
    open_ = false;
  }
  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

 private:
  void expect_open() const {
    if (!open_) {
      throw Error(ErrorCode::kInvalidArgument, "the file is closed").with_file(name_);
    }
  }

  std::string name_;
  std::shared_ptr<MemoryFile> file_;
  uint64_t size_ = 0;
  bool open_ = true;
};

class MemoryReadable : public ReadableFile {
 public:
  MemoryReadable(std::string name, std::shared_ptr<MemoryFile> file)
      : name_(std::move(name)), file_(std::move(file)), size_(file_->size()) {}
  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }
  const MemoryFile& file() const { return *file_; }

 private:
  std::string name_;
  std::shared_ptr<MemoryFile> file_;
  uint64_t size_;
};

void copy_out(const ReadOp& op, std::byte* target) {
  const auto& file = static_cast<const MemoryReadable&>(*op.file).file();
  std::lock_guard lock(file.mutex);
  if (op.size > 0) std::memcpy(target, file.data.data() + op.offset, op.size);
  set_checksums(op, {target, op.size});
}

}  // namespace

void MemoryStorage::expect_parent(const std::string& name) const {
  const std::string parent(parent_name(name));
  if (!parent.empty() && !directories_.contains(parent)) {
    fail(ErrorCode::kNotFound, name, "the directory of this name does not exist", ENOENT);
  }
}

void MemoryStorage::expect_no_directory(const std::string& name) const {
  if (directories_.contains(name)) {
    throw Error(ErrorCode::kUnsafe, "this is a directory, not a regular file").with_file(name);
  }
}

std::unique_ptr<WritableFile> MemoryStorage::create(const std::string& name, uint64_t,
                                                    const Deadline&) {
  check_file_name(name);
  std::lock_guard lock(mutex_);
  make_directories(parent_name(name));
  auto file = std::make_shared<MemoryFile>();
  if (directories_.contains(name) || !entries_.try_emplace(name, file).second) {
    fail(ErrorCode::kAlreadyExists, name, "cannot create a file", EEXIST);
  }
  return std::make_unique<MemoryWritable>(name, std::move(file));
}

std::unique_ptr<ReadableFile> MemoryStorage::open(const std::string& name) {
  check_file_name(name);
  std::lock_guard lock(mutex_);
  expect_no_directory(name);
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail(ErrorCode::kNotFound, name, "cannot open a file", ENOENT);
  return std::make_unique<MemoryReadable>(name, found->second);
}

void MemoryStorage::read(std::span<const ReadOp> ops, const ReadOptions& options,
                         const ReadDone& done) {
  for (const ReadOp& op : ops) {
    const auto* const file = dynamic_cast<const MemoryReadable*>(op.file);
    check_read_op(op, options, file != nullptr);
    expect_readable(file->name(), file->file());
  }
  const auto read_one = [&](size_t index) {
    const ReadOp& op = ops[index];
    if (options.deadline.expired()) {
      throw Error(ErrorCode::kTimeout, "the deadline passed while reading")
          .with_file(op.file->name());
    }
    if (op.target != nullptr || op.size == 0) {
      copy_out(op, op.target);
      done(index, {op.target, op.size});
    } else {
      const Buffer buffer = options.buffers->acquire(options.deadline);
      copy_out(op, buffer.data());
      done(index, {buffer.data(), op.size});
    }
  };
  if (options.threads != nullptr) {
    options.threads->parallel_for(ops.size(), read_one);
  } else {
    for (size_t index = 0; index < ops.size(); ++index) read_one(index);
  }
}

std::optional<FileInfo> MemoryStorage::stat(const std::string& name) {
  check_file_name(name);
  std::lock_guard lock(mutex_);
  if (directories_.contains(name)) return FileInfo{0, false};
  const auto found = entries_.find(name);
  if (found == entries_.end()) return std::nullopt;
  FileInfo info{found->second->size(), true};
  const auto number = reinterpret_cast<uintptr_t>(found->second.get());
  if (directories() != nullptr) info.identity = FileIdentity{0, number};
  return info;
}

Listing MemoryStorage::listing(const std::string& prefix, Depth depth) {
  if (depth == Depth::kAtOnce || depth == Depth::kUnfinished) return {};
  std::lock_guard lock(mutex_);
  const auto is_listed = [&](const std::string& name) {
    return depth == Depth::kTree || name.find('/', prefix.size()) == std::string::npos;
  };
  Listing found;
  for (auto it = entries_.lower_bound(prefix); it != entries_.end(); ++it) {
    if (!it->first.starts_with(prefix)) break;
    if (is_listed(it->first)) found.files.push_back(it->first);
  }
  if (depth == Depth::kTree) return found;
  for (auto it = directories_.lower_bound(prefix); it != directories_.end(); ++it) {
    if (!it->starts_with(prefix)) break;
    if (is_listed(*it)) found.directories.push_back(*it);
  }
  return found;
}

bool MemoryStorage::remove_files(std::span<const std::string> names, const FileRemoval& how) {
  if (how.unfinished) return true;
  for_each_name(names, [&](const std::string& name) {
    check_file_name(name);
    std::lock_guard lock(mutex_);
    if (directories_.contains(name)) fail(ErrorCode::kIo, name, "cannot remove a file", EISDIR);
    entries_.erase(name);
  });
  return true;
}

bool MemoryStorage::link(const StorageEntry& from, const std::string& name, const Deadline&) {
  check_file_name(name);
  check_file_name(from.name);
  const StorageEntry entry = without_children(from);
  const auto* const other = dynamic_cast<const MemoryStorage*>(entry.storage.get());
  auto file = other == nullptr ? nullptr : other->find(entry.name);
  if (file == nullptr) return false;
  if (directories() == nullptr) {  // a copy
    auto copy = std::make_shared<MemoryFile>();
    const std::lock_guard lock(file->mutex);
    copy->data = file->data;
    file = std::move(copy);
  }
  const std::lock_guard lock(mutex_);
  make_directories(parent_name(name));
  if (directories_.contains(name) || !entries_.try_emplace(name, std::move(file)).second) {
    fail(ErrorCode::kAlreadyExists, name, "cannot link a file", EEXIST);
  }
  return true;
}

std::shared_ptr<Storage> MemoryStorage::view(const std::string& directory,
                                             const std::optional<Deadline>&) {
  return directory.empty() ? shared_from_this() : child_storage(shared_from_this(), directory);
}

void MemoryStorage::make_directories(std::string_view name) {
  for (std::string_view part = name; !part.empty(); part = parent_name(part)) {
    if (entries_.contains(std::string(part))) {
      fail(ErrorCode::kIo, std::string(part), "cannot make a directory", ENOTDIR);
    }
  }
  for (std::string_view part = name; !part.empty(); part = parent_name(part)) {
    directories_.emplace(part);
  }
}

void MemoryStorage::expect_directory(const std::string& name, const std::string& what) const {
  if (directories_.contains(name)) return;
  if (entries_.contains(name)) fail(ErrorCode::kIo, name, what, ENOTDIR);
  fail(ErrorCode::kNotFound, name, what, ENOENT);
}

bool MemoryStorage::is_empty(const std::string& directory) const {
  const std::string prefix = directory + "/";
  const auto file = entries_.lower_bound(prefix);
  const auto inner = directories_.lower_bound(prefix);
  return (file == entries_.end() || !file->first.starts_with(prefix)) &&
         (inner == directories_.end() || !inner->starts_with(prefix));
}

struct MemoryStorage::Tree {
  Entries files;
  std::vector<std::string> directories;
};

MemoryStorage::Tree MemoryStorage::take(const std::string& directory) {
  Tree tree;
  const std::string prefix = directory + "/";
  const auto files = entries_.lower_bound(prefix);
  auto file = files;
  for (; file != entries_.end() && file->first.starts_with(prefix); ++file) {
    tree.files.emplace(file->first.substr(prefix.size()), file->second);
  }
  entries_.erase(files, file);
  const auto inner = directories_.lower_bound(prefix);
  auto last = inner;
  for (; last != directories_.end() && last->starts_with(prefix); ++last) {
    tree.directories.push_back(last->substr(prefix.size()));
  }
  directories_.erase(inner, last);
  directories_.erase(directory);
  return tree;
}

void MemoryStorage::put_tree(const std::string& directory, Tree tree) {
  directories_.insert(directory);
  for (const std::string& name : tree.directories) directories_.insert(directory + "/" + name);
  for (auto& [name, file] : tree.files) entries_.emplace(directory + "/" + name, std::move(file));
}

class MemoryStorage::OwnDirectories : public Directories {
 public:
  explicit OwnDirectories(MemoryStorage& storage) : storage_(storage) {}

  void make(const std::string& name) override {
    check_directory_name(name);
    std::lock_guard lock(storage_.mutex_);
    storage_.make_directories(name);
  }
  void remove(const std::string& name) override {
    constexpr const char* kWhat = "cannot remove a directory";
    check_file_name(name);
    std::lock_guard lock(storage_.mutex_);
    storage_.expect_directory(name, kWhat);
    if (!storage_.is_empty(name)) fail(ErrorCode::kIo, name, kWhat, ENOTEMPTY);
    storage_.directories_.erase(name);
  }
  void settle(const std::string& name) override {
    std::lock_guard lock(storage_.mutex_);
    if (!name.empty() && !storage_.directories_.contains(name)) {
      fail(ErrorCode::kNotFound, name, "cannot sync a directory", ENOENT);
    }
  }
  bool can_exchange() override { return true; }
  void exchange(const std::string& a, const std::string& b) override {
    const std::string what = "cannot exchange the directories \"" + a + "\" and \"" + b + "\"";
    check_apart(a, b, what);
    std::lock_guard lock(storage_.mutex_);
    storage_.expect_directory(a, what);
    storage_.expect_directory(b, what);
    Tree first = storage_.take(a), second = storage_.take(b);
    storage_.put_tree(a, std::move(second));
    storage_.put_tree(b, std::move(first));
  }
  void rename(const std::string& from, const std::string& to) override {
    const std::string what = "cannot rename the directory \"" + from + "\" to \"" + to + "\"";
    check_apart(from, to, what);
    std::lock_guard lock(storage_.mutex_);
    storage_.expect_directory(from, what);
    storage_.expect_parent(to);
    if (storage_.entries_.contains(to) || !storage_.is_empty(to)) {
      fail(ErrorCode::kAlreadyExists, to, what, EEXIST);
    }
    storage_.put_tree(to, storage_.take(from));
  }
  void rename_file(const std::string& from, const std::string& to, bool replace) override {
    check_file_name(from);
    check_file_name(to);
    std::lock_guard lock(storage_.mutex_);
    const auto found = storage_.entries_.find(from);
    if (found == storage_.entries_.end())
      fail(ErrorCode::kNotFound, from, "cannot rename a file", ENOENT);
    storage_.expect_parent(to);
    if (!replace && (storage_.entries_.contains(to) || storage_.directories_.contains(to))) {
      fail(ErrorCode::kAlreadyExists, to, "cannot rename \"" + from + "\" to this name", EEXIST);
    }
    if (storage_.directories_.contains(to)) {
      fail(ErrorCode::kIo, to, "cannot rename \"" + from + "\" to this name", EISDIR);
    }
    if (from == to) return;
    storage_.entries_[to] = found->second;
    storage_.entries_.erase(from);
  }
  void copy_permissions(const std::string&, const std::string&) override {}

 private:
  MemoryStorage& storage_;
};

MemoryStorage::MemoryStorage(FileImage initial)
    : own_directories_(std::make_unique<OwnDirectories>(*this)) {
  for (auto& [name, bytes] : initial) {
    check_file_name(name);
    auto file = std::make_shared<MemoryFile>();
    file->data = std::move(bytes);
    entries_.emplace(name, std::move(file));
    for (auto parent = parent_name(name); !parent.empty(); parent = parent_name(parent)) {
      directories_.emplace(parent);
    }
  }
}

class MemoryStorage::Lock : public StorageClaim {
 public:
  Lock(std::shared_ptr<MemoryStorage> storage, std::string name)
      : storage_(std::move(storage)), name_(std::move(name)) {}
  ~Lock() override {
    std::lock_guard lock(storage_->mutex_);
    storage_->locks_.erase(name_);
  }

 private:
  std::shared_ptr<MemoryStorage> storage_;
  std::string name_;
};

std::unique_ptr<StorageClaim> MemoryStorage::claim(const std::string& name, const Deadline&) {
  check_file_name(name);
  std::lock_guard lock(mutex_);
  make_directories(parent_name(name));
  expect_no_directory(name);
  entries_.try_emplace(name, std::make_shared<MemoryFile>());
  if (!locks_.insert(name).second) return nullptr;
  return std::make_unique<Lock>(std::static_pointer_cast<MemoryStorage>(shared_from_this()), name);
}

bool MemoryStorage::is_claimed(const std::string& name) {
  check_file_name(name);
  std::lock_guard lock(mutex_);
  return locks_.contains(name);
}

MemoryStorage::Entries MemoryStorage::entries() const {
  std::lock_guard lock(mutex_);
  return entries_;
}

std::set<std::string> MemoryStorage::directory_names() const {
  std::lock_guard lock(mutex_);
  return directories_;
}

std::shared_ptr<MemoryFile> MemoryStorage::find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : found->second;
}

std::shared_ptr<Storage> memory_storage(FileImage initial) {
  return std::make_shared<MemoryStorage>(std::move(initial));
}

FileImage memory_image(Storage& storage) {
  const auto* memory = dynamic_cast<MemoryStorage*>(&storage);
  if (memory == nullptr) {
    throw Error(ErrorCode::kInvalidArgument,
                "memory_image needs a memory storage, not " + storage.describe());
  }
  FileImage image;
  for (const auto& [name, file] : memory->entries()) {
    std::lock_guard lock(file->mutex);
    image.emplace(name, file->data);
  }
  return image;
}

}  // namespace tilestone
