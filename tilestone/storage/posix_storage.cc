#include "tilestone/storage/posix_storage.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/storage/names_internal.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/read_ops_internal.h"

namespace tilestone {
namespace {

constexpr unsigned kFileMode = 0666;  // less the umask
constexpr unsigned kDirectoryMode = 0777;

// The directory that holds a name, and the name in it.
struct Place {
  UniqueFd directory;
  std::string last;
};

// Makes `path` and its parents, as the user wrote it, and what was made durable.
void make_root(System& system, const std::string& path) {
  std::vector<std::string> missing;  // innermost first
  for (std::string part = path;;) {
    struct stat info;
    if (::stat(part.c_str(), &info) == 0) break;
    if (errno != ENOENT) fail_errno("cannot make a directory", part, errno);
    missing.push_back(part);
    const auto parent = parent_name(part);
    if (parent.empty()) break;
    part = std::string(parent);
  }
  for (auto part = missing.rbegin(); part != missing.rend(); ++part) {
    if (::mkdir(part->c_str(), kDirectoryMode) != 0 && errno != EEXIST) {
      fail_errno("cannot make a directory", *part, errno);
    }
    const bool top = part->find('/') == std::string::npos;
    const std::string parent = top ? "." : std::string(parent_name(*part)) + "/";
    const UniqueFd directory(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!directory || system.fsync(directory.get()) != 0) {
      fail_errno("cannot sync a directory", parent, errno);
    }
  }
}

class PosixStorage : public Storage {
 public:
  PosixStorage(const std::string& root, const PosixOptions& options, std::shared_ptr<System> system)
      : context_(std::make_shared<PosixContext>(root, options, std::move(system))) {}

  uint32_t capabilities() const override {
    const bool cache = context_->options().read_cache != PosixOptions::Cache::kDirect;
    return (cache ? static_cast<uint32_t>(StorageCapability::kSharedCache) : 0u) |
           static_cast<uint32_t>(StorageCapability::kAtomicRename) |
           static_cast<uint32_t>(StorageCapability::kExclusiveRename) |
           static_cast<uint32_t>(StorageCapability::kDirectories) |
           static_cast<uint32_t>(StorageCapability::kDirectIo) |
           static_cast<uint32_t>(StorageCapability::kLocks);
  }
  std::string describe() const override { return context_->root(); }

  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size) override {
    check_file_name(name);
    UniqueFd fd = open_at_root(name, O_RDWR | O_CREAT | O_EXCL | O_NOCTTY, kFileMode);
    if (!fd) fail_errno("cannot create a file", context_->path_of(name), errno);
    return posix_writer(context_, name, std::move(fd), expected_size);
  }

  std::unique_ptr<ReadableFile> open(const std::string& name) override {
    check_file_name(name);
    UniqueFd fd = context_->open_to_read(name, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (!fd && errno == EXDEV) refuse_link(name);
    if (!fd && (errno == ENXIO || errno == ENODEV)) refuse_irregular(name);
    if (!fd)
      fail_errno("cannot open a file", context_->path_of(name), errno == ENOTDIR ? ENOENT : errno);
    const uint64_t size = expect_regular(fd.get(), name);
    if (context_->options().read_cache != PosixOptions::Cache::kBuffered) {
      // No reading ahead: callers know what they need, and pages that are only on their way count
      // as cached, which would draw the following ranges into the page cache too. An advice, so
      // its failure is none.
      ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_RANDOM);
    }
    return std::make_unique<PosixReadable>(context_, name, std::move(fd), size);
  }

  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    for (const ReadOp& op : ops) check(op, options);
    posix_read(*context_, ops, options, done);
  }

  uint64_t prefetch(std::span<const ReadOp> ops, const ReadOptions& options) override {
    if (!can(StorageCapability::kSharedCache)) return 0;
    for (ReadOp op : ops) {
      op.target = nullptr;
      check(op, options);
    }
    return posix_prefetch(*context_, ops, options);
  }

  std::optional<FileInfo> stat(const std::string& name) override {
    check_file_name(name);
    const UniqueFd fd = context_->open_to_read(name, O_PATH);
    struct stat info;
    if (fd && ::fstat(fd.get(), &info) == 0) {
      if (!S_ISREG(info.st_mode)) return FileInfo{0, false};
      return FileInfo{static_cast<uint64_t>(info.st_size), true};
    }
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    if (errno == EXDEV) refuse_link(name);
    fail_errno("cannot look at a file", context_->path_of(name), errno);
  }

  std::vector<std::string> list(const std::string& prefix) override;
  void rename(const std::string& from, const std::string& to, bool replace) override;

  void remove(const std::string& name) override {
    const Place place = locate(name, "cannot remove a file");
    if (::unlinkat(place.directory.get(), place.last.c_str(), 0) != 0) {
      fail_errno("cannot remove a file", context_->path_of(name), errno);
    }
  }

  void make_directory(const std::string& name) override;

  void sync_directory(const std::string& name) override {
    check_directory_name(name);
    const UniqueFd fd = open_at_root(name, O_RDONLY | O_DIRECTORY);
    if (!fd || context_->system().fsync(fd.get()) != 0) {
      fail_errno("cannot sync a directory", context_->path_of(name), errno);
    }
  }

  std::unique_ptr<StorageLock> try_lock(const std::string& name) override {
    check_file_name(name);
    UniqueFd fd = open_at_root(name, O_RDWR | O_CREAT | O_NONBLOCK | O_NOCTTY, kFileMode);
    if (!fd) fail_errno("cannot open a lock", context_->path_of(name), errno);
    expect_regular(fd.get(), name);
    return posix_try_lock(std::move(fd), context_->path_of(name));
  }

  bool is_locked(const std::string& name) override {
    check_file_name(name);
    const UniqueFd fd = open_at_root(name, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (!fd && (errno == ENOENT || errno == ENOTDIR)) return false;
    if (!fd) fail_errno("cannot look at a lock", context_->path_of(name), errno);
    expect_regular(fd.get(), name);
    return posix_is_locked(fd.get(), context_->path_of(name));
  }

 private:
  void check(const ReadOp& op, const ReadOptions& options) const {
    const auto* file = dynamic_cast<const PosixReadable*>(op.file);
    check_read_op(op, options, file != nullptr && &file->context() == context_.get());
  }

  UniqueFd open_at_root(const std::string& name, int flags, unsigned mode = 0) {
    const UniqueFd root = context_->try_open_root();
    if (!root) return {};
    return open_beneath(context_->system(), root.get(), name, flags, mode);
  }

  Place locate(const std::string& name, const std::string& what) {
    check_file_name(name);
    const auto [parent, last] = split_name(name);
    UniqueFd directory = open_at_root(std::string(parent), O_PATH | O_DIRECTORY);
    if (!directory) fail_errno(what, context_->path_of(name), errno);
    return {std::move(directory), std::string(last)};
  }

  [[noreturn]] void refuse_irregular(const std::string& name) const {
    throw Error(ErrorCode::kUnsafe, "not a regular file").with_file(context_->path_of(name));
  }

  [[noreturn]] void refuse_link(const std::string& name) const {
    throw Error(ErrorCode::kUnsafe, "a symbolic link leaves the storage's root")
        .with_file(context_->path_of(name))
        .with_hint(
            "follow_links=True (PosixOptions::links) reads through links; only where you "
            "trust who made them");
  }

  // The size of an open file, made ready for reading.
  uint64_t expect_regular(int fd, const std::string& name) const {
    struct stat info;
    if (::fstat(fd, &info) != 0)
      fail_errno("cannot look at a file", context_->path_of(name), errno);
    if (!S_ISREG(info.st_mode)) refuse_irregular(name);
    if (!clear_nonblocking(fd)) fail_errno("cannot open a file", context_->path_of(name), errno);
    return static_cast<uint64_t>(info.st_size);
  }

  void list_directory(const std::string& directory, const std::string& prefix,
                      std::vector<std::string>& files, std::vector<std::string>& directories);

  std::shared_ptr<PosixContext> context_;
};

// Adds the files and the directories in one directory ("": the root) whose names may start with
// the prefix. A directory that went meanwhile holds nothing.
void PosixStorage::list_directory(const std::string& directory, const std::string& prefix,
                                  std::vector<std::string>& files,
                                  std::vector<std::string>& directories) {
  UniqueFd fd = open_at_root(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!fd && (errno == ENOENT || errno == ENOTDIR)) return;
  if (!fd) fail_errno("cannot list a directory", context_->path_of(directory), errno);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd.get()), ::closedir);
  if (stream == nullptr) fail_errno("cannot list a directory", context_->path_of(directory), errno);
  fd.release();
  for (;;) {
    errno = 0;
    const dirent* const entry = ::readdir(stream.get());
    if (entry == nullptr && errno != 0)
      fail_errno("cannot list a directory", context_->path_of(directory), errno);
    if (entry == nullptr) return;
    const std::string last = entry->d_name;
    if (last == "." || last == "..") continue;
    const std::string name = directory.empty() ? last : directory + "/" + last;
    struct stat info;
    if (::fstatat(::dirfd(stream.get()), last.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISDIR(info.st_mode)) {
      if (name.starts_with(prefix)) files.push_back(name);
    } else if (name.starts_with(prefix) || prefix.starts_with(name + "/")) {
      directories.push_back(name);
    }
  }
}

std::vector<std::string> PosixStorage::list(const std::string& prefix) {
  std::vector<std::string> files;
  std::vector<std::string> directories = {""};
  while (!directories.empty()) {
    const std::string directory = std::move(directories.back());
    directories.pop_back();
    list_directory(directory, prefix, files, directories);
  }
  std::sort(files.begin(), files.end());
  return files;
}

void PosixStorage::rename(const std::string& from, const std::string& to, bool replace) {
  const std::string what = "cannot rename \"" + from + "\" to \"" + to + "\"";
  const Place old_place = locate(from, what);
  const Place new_place = locate(to, what);
  const int old_dir = old_place.directory.get(), new_dir = new_place.directory.get();
  const char* const old_last = old_place.last.c_str();
  const char* const new_last = new_place.last.c_str();
  int result;
  if (replace) {
    result = ::renameat(old_dir, old_last, new_dir, new_last);
  } else {
    result = context_->system().rename_exclusive(old_dir, old_last, new_dir, new_last);
    if (result != 0 && (errno == ENOSYS || errno == EINVAL)) {
      // link is atomic and replaces nothing. A crash before unlink leaves both names, of one file.
      result = ::linkat(old_dir, old_last, new_dir, new_last, 0);
      if (result == 0) result = ::unlinkat(old_dir, old_last, 0);
    }
  }
  if (result != 0 && errno == EXDEV) {
    throw Error(ErrorCode::kIo, what).with_file(context_->path_of(from)).with_errno(EXDEV);
  }
  if (result != 0) fail_errno(what, context_->path_of(errno == EEXIST ? to : from), errno);
}

void PosixStorage::make_directory(const std::string& name) {
  check_directory_name(name);
  make_root(context_->system(), context_->root());
  for (size_t end = 0; end < name.size(); ++end) {
    end = std::min(name.find('/', end), name.size());
    const std::string part = name.substr(0, end);
    const Place place = locate(part, "cannot make a directory");
    if (::mkdirat(place.directory.get(), place.last.c_str(), kDirectoryMode) == 0) continue;
    if (errno != EEXIST) fail_errno("cannot make a directory", context_->path_of(part), errno);
    if (!open_at_root(part, O_PATH | O_DIRECTORY)) {
      fail_errno("cannot make a directory", context_->path_of(part), errno);
    }
  }
}

}  // namespace

PosixContext::PosixContext(std::string root, const PosixOptions& options,
                           std::shared_ptr<System> system)
    : root_(std::move(root)), options_(options), system_(std::move(system)) {
  if (root_.empty() || root_.find('\0') != std::string::npos || options_.queue_depth == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "a storage needs a root directory and a queue depth of at least 1")
        .with_file(root_);
  }
  while (root_.size() > 1 && root_.back() == '/') root_.pop_back();
  if (options.calls == PosixOptions::Calls::kUring) give_back(take_queue());
}

std::unique_ptr<IoQueue> PosixContext::take_queue() {
  Own& own = *own_;
  std::lock_guard lock(own.mutex);
  if (!own.idle.empty()) {
    auto queue = std::move(own.idle.back());
    own.idle.pop_back();
    return queue;
  }
  if (own.uring && options_.calls != PosixOptions::Calls::kPlain) {
    int error = 0;
    auto queue = system_->uring_queue(options_.queue_depth, error);
    if (queue != nullptr) return queue;
    const std::string why = "io_uring is not available here";
    if (options_.calls == PosixOptions::Calls::kUring) {
      throw Error(ErrorCode::kUnsupported, why).with_errno(error);
    }
    log_once(LogLevel::kWarning, why + ": " + std::strerror(error) + "; plain calls are used");
    own.uring = false;
  }
  return make_thread_queue(*system_, options_.queue_depth);
}

void PosixContext::give_back(std::unique_ptr<IoQueue> queue) {
  Own& own = *own_;
  std::lock_guard lock(own.mutex);
  own.idle.push_back(std::move(queue));
}

bool PosixContext::make_direct(int fd) {
  if (system_->set_direct(fd, true) == 0) return true;
  note_no_direct(errno);
  return false;
}

void PosixContext::note_no_direct(int error) {
  log_once(LogLevel::kWarning,
           std::string("direct I/O is not to be had on a file system in use: ") +
               std::strerror(error) + "; the page cache is used there");
}

std::string PosixContext::path_of(const std::string& name) const {
  if (name.empty()) return root_;
  return root_.ends_with('/') ? root_ + name : root_ + "/" + name;
}

UniqueFd PosixContext::open_to_read(const std::string& name, int flags) const {
  const UniqueFd root = try_open_root();
  if (!root) return {};
  UniqueFd fd = open_beneath(*system_, root.get(), name, flags);
  if (fd || errno != EXDEV) return fd;
  return open_linked(root.get(), name, flags, options_.links == PosixOptions::Links::kAll);
}

UniqueFd PosixContext::try_open_root() const {
  return UniqueFd(::open(root_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
}

std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options,
                                       std::shared_ptr<System> system) {
  return std::make_shared<PosixStorage>(root, options, std::move(system));
}

std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options) {
  return posix_storage(root, options, std::make_shared<System>());
}

}  // namespace tilestone
