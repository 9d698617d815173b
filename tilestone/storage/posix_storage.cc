#include "tilestone/storage/posix_storage.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>

#include "tilestone/base/error.h"
#include "tilestone/storage/directories.h"
#include "tilestone/storage/names_internal.h"
#include "tilestone/storage/posix_internal.h"
#include "tilestone/storage/read_ops_internal.h"

namespace tilestone {
namespace {

double seconds_of(const timespec& time) {
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Whether a name was not opened because nothing has it. Any other error leaves that open.
bool is_absence(int error) { return error == ENOENT || error == ENOTDIR; }

// Whether both are the same file. `own` may be of a file that its server has removed.
bool is_same(int own, int other, const std::string& path) {
  struct stat a, b;
  if (::fstat(own, &a) != 0) {
    if (errno == ESTALE) return false;
    fail_errno("cannot stat an open file", path, errno);
  }
  if (::fstat(other, &b) != 0) fail_errno("cannot stat an open file", path, errno);
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

class PosixDirectories : public Directories {
 public:
  explicit PosixDirectories(std::shared_ptr<PosixContext> context) : context_(std::move(context)) {}

  void make(const std::string& name) override { posix_make_directory(*context_, name); }
  void remove(const std::string& name) override { posix_remove_directory(*context_, name); }
  void settle(const std::string& name) override { context_->settle(name); }
  bool can_exchange() override { return posix_can_exchange(*context_); }
  void exchange(const std::string& a, const std::string& b) override {
    posix_exchange(*context_, a, b);
  }
  void rename(const std::string& from, const std::string& to) override {
    posix_rename_directory(*context_, from, to);
  }
  void rename_file(const std::string& from, const std::string& to, bool replace) override;
  void copy_permissions(const std::string& name, const std::string& like) override;
  std::optional<StorageEntry> parent() override;
  std::shared_ptr<Storage> held() override;
  bool stands() const override { return context_->stands(); }

  std::shared_ptr<Storage> with_root(PosixRoot root) const;

 private:
  std::shared_ptr<PosixContext> context_;
};

class PosixStorage : public Storage {
 public:
  explicit PosixStorage(std::shared_ptr<PosixContext> context) : context_(std::move(context)) {}

  StorageFacts facts() const override {
    // PATH_MAX counts the NUL at the end.
    const uint64_t root = std::filesystem::absolute(context_->root()).native().size();
    return {.description = context_->root(),
            .directories = &directories_,
            .has_folders = true,
            .renames = true,
            .page_cache = true,
            .shared_cache = true,
            .max_name_bytes = root + 2 < PATH_MAX ? PATH_MAX - 2 - root : 0};
  }
  std::shared_ptr<Storage> view(const std::string& directory,
                                const std::optional<Deadline>&) override {
    if (directory.empty()) return shared_from_this();
    return directories_.with_root({context_->path_of(directory), context_, directory, {}});
  }

  std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size,
                                       const Deadline&) override {
    check_file_name(name);
    UniqueFd fd = posix_open_new(*context_, name, O_RDWR | O_CREAT | O_EXCL | O_NOCTTY, false);
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
    // No read-ahead: callers know what they need. Pages that are still being read count as cached,
    // so read-ahead would make the following ranges use the page cache too. This is only advice, so
    // a failure is ignored.
    ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_RANDOM);
    return std::make_unique<PosixReadable>(context_, name, std::move(fd), size);
  }

  void read(std::span<const ReadOp> ops, const ReadOptions& options,
            const ReadDone& done) override {
    for (ReadOp op : ops) {
      if (options.prefetched != nullptr) op.target = nullptr;
      check(op, options);
    }
    posix_read(*context_, ops, options, done);
  }

  std::optional<FileInfo> stat(const std::string& name) override {
    check_file_name(name);
    const UniqueFd fd = context_->open_to_read(name, O_PATH);
    struct stat info;
    if (fd && ::fstat(fd.get(), &info) == 0) {
      if (!S_ISREG(info.st_mode)) return FileInfo{0, false};
      FileInfo found{static_cast<uint64_t>(info.st_size), true, seconds_of(info.st_mtim)};
      if (info.st_nlink > 1) found.identity = FileIdentity{info.st_dev, info.st_ino};
      return found;
    }
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    if (errno == EXDEV) refuse_link(name);
    fail_errno("cannot stat a file", context_->path_of(name), errno);
  }

  Listing listing(const std::string& prefix, Depth depth) override {
    if (depth == Depth::kAtOnce || depth == Depth::kUnfinished) return {};
    return posix_list(*context_, prefix, depth);
  }

  bool remove_files(std::span<const std::string> names, const FileRemoval& how) override {
    if (how.unfinished) return true;
    for_each_name(names, [&](const std::string& name) {
      check_file_name(name);
      const auto [above, last] = split_name(name);
      const UniqueFd directory = context_->open_at_root(std::string(above), O_PATH | O_DIRECTORY);
      if (directory && ::unlinkat(directory.get(), std::string(last).c_str(), 0) == 0) return;
      if (errno == ENOENT || (!directory && errno == ENOTDIR)) return;
      fail_errno("cannot remove a file", context_->path_of(name), errno);
    });
    return true;
  }

  bool link(const StorageEntry& from, const std::string& name, const Deadline& deadline) override {
    const auto* const other = dynamic_cast<const PosixStorage*>(from.storage.get());
    if (other == nullptr) return Storage::link(from, name, deadline);
    return posix_link(*other->context_, from.name, *context_, name);
  }

  std::unique_ptr<StorageClaim> claim(const std::string& name, const Deadline&) override {
    check_file_name(name);
    for (int tries = 0; tries < 8; ++tries) {
      UniqueFd fd = posix_open_new(*context_, name, O_RDWR | O_CREAT | O_NONBLOCK | O_NOCTTY, true);
      if (!fd) fail_errno("cannot open a lock file", context_->path_of(name), errno);
      expect_regular(fd.get(), name);
      const int file = fd.get();
      auto lock = posix_claim(context_->system(), std::move(fd), context_->path_of(name));
      // Who holds a lock may remove its file: then this is the lock of a file without a name.
      if (lock == nullptr || is_at(file, name)) return lock;
    }
    return nullptr;
  }

  bool is_claimed(const std::string& name) override {
    check_file_name(name);
    const UniqueFd fd = context_->open_at_root(name, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (!fd && (errno == ENOENT || errno == ENOTDIR)) return false;
    if (!fd) fail_errno("cannot check a lock", context_->path_of(name), errno);
    expect_regular(fd.get(), name);
    return posix_is_locked(fd.get(), context_->path_of(name));
  }

 private:
  void check(const ReadOp& op, const ReadOptions& options) const {
    const auto* file = dynamic_cast<const PosixReadable*>(op.file);
    check_read_op(op, options, file != nullptr && &file->context() == context_.get());
  }

  // Whether the name is still that of the open file.
  bool is_at(int fd, const std::string& name) const {
    const UniqueFd now = context_->open_at_root(name, O_PATH | O_NOFOLLOW);
    if (!now && !is_absence(errno)) {
      fail_errno("cannot look at a file", context_->path_of(name), errno);
    }
    return now && is_same(fd, now.get(), context_->path_of(name));
  }

  [[noreturn]] void refuse_irregular(const std::string& name) const {
    throw Error(ErrorCode::kUnsafe, "not a regular file").with_file(context_->path_of(name));
  }

  [[noreturn]] void refuse_link(const std::string& name) const {
    throw Error(ErrorCode::kUnsafe, "a symbolic link leaves the storage's root")
        .with_file(context_->path_of(name))
        .with_hint(
            "to read through such links, set reading.follow_links (--follow-links on the command "
            "line, PosixOptions::links in C++); do so only if you trust whoever made them");
  }

  // The size of an open file, in bytes. Throws if it is not a regular file; clears O_NONBLOCK.
  uint64_t expect_regular(int fd, const std::string& name) const {
    struct stat info;
    if (::fstat(fd, &info) != 0) fail_errno("cannot stat a file", context_->path_of(name), errno);
    if (!S_ISREG(info.st_mode)) refuse_irregular(name);
    if (!clear_nonblocking(fd)) fail_errno("cannot open a file", context_->path_of(name), errno);
    return static_cast<uint64_t>(info.st_size);
  }

  std::shared_ptr<PosixContext> context_;
  mutable PosixDirectories directories_{context_};
};

void PosixDirectories::rename_file(const std::string& from, const std::string& to, bool replace) {
  const std::string what = "cannot rename \"" + from + "\" to \"" + to + "\"";
  const PosixEntry old_entry = context_->locate(from, what);
  const PosixEntry new_entry = context_->locate(to, what);
  const int old_dir = old_entry.directory.get(), new_dir = new_entry.directory.get();
  const char* const old_last = old_entry.last.c_str();
  const char* const new_last = new_entry.last.c_str();
  int result;
  if (replace) {
    result = ::renameat(old_dir, old_last, new_dir, new_last);
  } else {
    result = context_->system().rename_exclusive(old_dir, old_last, new_dir, new_last);
    if (result != 0 && (errno == ENOSYS || errno == EINVAL)) {
      // link is atomic and never replaces a name. A crash before unlink leaves two names for one
      // file.
      result = ::linkat(old_dir, old_last, new_dir, new_last, 0);
      if (result == 0) result = ::unlinkat(old_dir, old_last, 0);
    }
  }
  if (result != 0 && errno == EXDEV) {
    throw Error(ErrorCode::kIo, what).with_file(context_->path_of(from)).with_errno(EXDEV);
  }
  if (result != 0) fail_errno(what, context_->path_of(errno == EEXIST ? to : from), errno);
}

void PosixDirectories::copy_permissions(const std::string& name, const std::string& like) {
  struct stat wanted, info;
  const auto look_at = [&](const std::string& file, struct stat& found) {
    UniqueFd fd = context_->open_to_read(file, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (!fd || ::fstat(fd.get(), &found) != 0) {
      fail_errno("cannot stat a file", context_->path_of(file), errno);
    }
    return fd;
  };
  look_at(like, wanted);
  const UniqueFd fd = look_at(name, info);
  // Only root may give a file away. First the owner, because a change of it clears bits of the
  // mode.
  if (info.st_uid != wanted.st_uid || info.st_gid != wanted.st_gid) {
    if (::fchown(fd.get(), wanted.st_uid, wanted.st_gid) != 0) {
      static_cast<void>(::fchown(fd.get(), static_cast<uid_t>(-1), wanted.st_gid) == 0);
    }
  }
  // The owner of a directory keeps the right to change it, or it could not be filled or removed.
  const bool is_directory = S_ISDIR(info.st_mode);
  const mode_t mode = is_directory ? (wanted.st_mode & 07777) | S_IRWXU : wanted.st_mode & 0777;
  if ((info.st_mode & (is_directory ? 07777 : 0777)) == mode) return;
  if (::fchmod(fd.get(), mode) != 0) {
    fail_errno("cannot change the permissions of a file", context_->path_of(name), errno);
  }
}

std::shared_ptr<Storage> PosixDirectories::with_root(PosixRoot root) const {
  return std::make_shared<PosixStorage>(std::make_shared<PosixContext>(
      std::move(root), context_->options(), context_->shared_system()));
}

std::optional<StorageEntry> PosixDirectories::parent() {
  const PosixRoot& found = context_->root_found();
  if (found.within != nullptr && !posix_is_link(*found.within, found.name)) {
    const auto [above, last] = split_name(found.name);
    auto inside = std::make_shared<PosixStorage>(found.within);
    if (above.empty()) return StorageEntry{std::move(inside), std::string(last)};
    return StorageEntry{inside->child(std::string(above)), std::string(last)};
  }
  const std::string path = posix_resolved_root(*context_);
  if (path.size() <= 1) return std::nullopt;
  const auto [above, last] = split_name(path);
  return StorageEntry{with_root({above.empty() ? "/" : std::string(above), nullptr, "", {}}),
                      std::string(last)};
}

std::shared_ptr<Storage> PosixDirectories::held() {
  UniqueFd root = context_->try_open_root();
  if (!root) fail_errno("cannot open a directory", context_->root(), errno);
  return with_root({context_->root(), nullptr, "", std::move(root), context_});
}

}  // namespace

PosixContext::PosixContext(PosixRoot root, const PosixOptions& options,
                           std::shared_ptr<System> system)
    : root_(std::move(root)), options_(options), system_(std::move(system)) {
  std::string& path = root_.path;
  if (path.empty() || path.find('\0') != std::string::npos || options_.queue_depth == 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "a storage needs a root directory, without NUL, and a queue depth of at least 1")
        .with_file(path);
  }
  while (path.size() > 1 && path.back() == '/') path.pop_back();
}

std::unique_ptr<IoQueue> PosixContext::take_queue() {
  Own& own = *own_;
  std::lock_guard lock(own.mutex);
  if (!own.idle.empty()) {
    auto queue = std::move(own.idle.back());
    own.idle.pop_back();
    return queue;
  }
  if (own.uring) {
    int error = 0;
    auto queue = system_->uring_queue(options_.queue_depth, error);
    if (queue != nullptr) return queue;
    log_once(LogLevel::kWarning, std::string("io_uring is not available: ") + std::strerror(error) +
                                     "; using plain system calls instead");
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
           std::string("direct I/O is not available on a file system in use: ") +
               std::strerror(error) + "; using the page cache there instead");
}

// A page that has just been read is in the page cache. If System::cached_bytes does not find it, it
// does not work on this file system.
int PosixContext::cached_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes) {
  if (!pages_hidden_.get().value_or(false)) {
    const int result = system_->cached_bytes(fd, offset, size, bytes);
    if (result != 0 || bytes > 0 || pages_hidden_.get()) return result;
    std::byte first;
    uint64_t now = 0;
    if (system_->pread(fd, &first, 1, offset) != 1) return result;
    if (system_->cached_bytes(fd, offset, 1, now) != 0) return result;
    pages_hidden_.set(now == 0);
    if (now > 0) return result;
  }
  return system_->resident_bytes(fd, offset, size, bytes);
}

std::string PosixContext::path_of(const std::string& name) const {
  if (name.empty()) return root();
  return root() + (root().ends_with('/') ? "" : "/") + name;
}

UniqueFd PosixContext::open_to_read(const std::string& name, int flags) const {
  const UniqueFd root = try_open_root();
  if (!root) return {};
  UniqueFd fd = open_beneath(*system_, root.get(), name, flags);
  if (fd || errno != EXDEV) return fd;
  return open_linked(root.get(), name, flags, options_.links == PosixOptions::Links::kAll);
}

UniqueFd PosixContext::try_open_root() const {
  constexpr int kFlags = O_PATH | O_DIRECTORY | O_CLOEXEC;
  UniqueFd root;
  if (root_.held) {
    root = UniqueFd(::openat(root_.held.get(), ".", kFlags));
  } else if (root_.within != nullptr) {
    root = root_.within->open_at_root(root_.name, kFlags);
  } else {
    root = UniqueFd(::open(root_.path.c_str(), kFlags));
  }
  if (root) root_was_there_ = true;
  return root;
}

bool PosixContext::stands() const {
  if (root_.held_from == nullptr) return true;
  const UniqueFd now = root_.held_from->try_open_root();
  if (!now && !is_absence(errno)) fail_errno("cannot open a directory", root(), errno);
  return now && is_same(root_.held.get(), now.get(), root());
}

UniqueFd PosixContext::open_at_root(const std::string& name, int flags, unsigned mode) const {
  const UniqueFd root = try_open_root();
  if (!root) return {};
  return open_beneath(*system_, root.get(), name, flags, mode);
}

PosixEntry PosixContext::locate(const std::string& name, const std::string& what) const {
  check_file_name(name);
  const auto [parent, last] = split_name(name);
  UniqueFd directory = open_at_root(std::string(parent), O_PATH | O_DIRECTORY);
  if (!directory) fail_errno(what, path_of(name), errno);
  return {std::move(directory), std::string(last)};
}

void PosixContext::settle(const std::string& name) {
  check_directory_name(name);
  const UniqueFd fd = open_at_root(name, O_RDONLY | O_DIRECTORY);
  if (!fd || system_->fsync(fd.get()) != 0) {
    fail_errno("cannot sync a directory", path_of(name), errno);
  }
}

std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options,
                                       std::shared_ptr<System> system) {
  return std::make_shared<PosixStorage>(
      std::make_shared<PosixContext>(PosixRoot{root, nullptr, "", {}}, options, std::move(system)));
}

std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options) {
  return posix_storage(root, options, std::make_shared<System>());
}

}  // namespace tilestone
