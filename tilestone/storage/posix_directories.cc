// The operations of the POSIX storage on directories.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "tilestone/base/error.h"
#include "tilestone/storage/names_internal.h"
#include "tilestone/storage/posix_internal.h"

namespace tilestone {
namespace {

constexpr unsigned kDirectoryMode = 0777, kFileMode = 0666;  // the kernel applies the umask
constexpr int kMaxTries = 100;  // while other processes remove directories

// If `path`, as the user wrote it, does not exist because a symbolic link in it has no target,
// throws Error(kNotFound) that names the link.
void refuse_broken_link(const std::string& path, const std::string& what) {
  for (std::string part = path; !part.empty(); part = std::string(parent_name(part))) {
    struct stat info;
    if (::lstat(part.c_str(), &info) != 0) continue;
    if (!S_ISLNK(info.st_mode) || ::stat(part.c_str(), &info) == 0 || errno != ENOENT) return;
    throw Error(ErrorCode::kNotFound, what + ": the target of a symbolic link does not exist")
        .with_file(part)
        .with_errno(ENOENT)
        .with_hint("make the directory that the link points to, or remove the link");
  }
}

// Makes `path`, as the user wrote it, and its parents. Everything that was made is durable. False:
// another process has removed an outer one, which was still empty.
bool try_make_path(System& system, const std::string& path) {
  refuse_broken_link(path, "cannot make a directory");
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
      if (errno == ENOENT) return false;
      fail_errno("cannot make a directory", *part, errno);
    }
    const bool top = part->find('/') == std::string::npos;
    const std::string parent = top ? "." : std::string(parent_name(*part)) + "/";
    const UniqueFd directory(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!directory && errno == ENOENT) return false;
    if (!directory || system.fsync(directory.get()) != 0) {
      fail_errno("cannot sync a directory", parent, errno);
    }
  }
  return true;
}

void make_path(System& system, const std::string& path) {
  for (int tries = 1; !try_make_path(system, path); ++tries) {
    if (tries == kMaxTries) fail_errno("cannot make a directory", path, ENOENT);
  }
}

void make_directories(PosixContext& context, const std::string& name, bool durably);

void make_root(PosixContext& context) {
  const PosixRoot& root = context.root_found();
  if (root.within != nullptr) {
    make_directories(*root.within, root.name, true);
  } else if (!root.held) {
    make_path(context.system(), root.path);
  }
}

// Makes the directory and those that contain it, below the root.
void make_each_directory(PosixContext& context, const std::string& name, bool durably) {
  constexpr const char* kWhat = "cannot make a directory";
  for (size_t end = 0; end < name.size(); ++end) {
    end = std::min(name.find('/', end), name.size());
    const std::string part = name.substr(0, end);
    const PosixEntry entry = context.locate(part, kWhat);
    if (::mkdirat(entry.directory.get(), entry.last.c_str(), kDirectoryMode) == 0) {
      if (durably) context.settle(std::string(parent_name(part)));
      continue;
    }
    if (errno != EEXIST) fail_errno(kWhat, context.path_of(part), errno);
    if (!context.open_at_root(part, O_PATH | O_DIRECTORY)) {
      fail_errno(kWhat, context.path_of(part), errno);
    }
  }
}

// Another process may remove an outer directory, while it is empty, before the inner one is made.
// Then both are made again.
void make_directories(PosixContext& context, const std::string& name, bool durably) {
  make_root(context);
  for (int tries = 1;; ++tries) {
    try {
      return make_each_directory(context, name, durably);
    } catch (const Error& error) {
      const bool is_inner = name.find('/') != std::string::npos;
      if (error.code() != ErrorCode::kNotFound || !is_inner || tries == kMaxTries) throw;
    }
  }
}

// Lists the files or directories whose names start with a prefix.
class DirectoryListing {
 public:
  DirectoryListing(PosixContext& context, const std::string& prefix)
      : context_(context), prefix_(prefix) {}

  // Of kLevel, only the directory part of the prefix is read.
  Listing read(Depth depth) {
    expect_usable_root();
    Listing found;
    const std::optional<std::string> first = start();
    std::vector<std::string> todo;
    if (first) todo.push_back(*first);
    while (!todo.empty()) {
      const std::string directory = std::move(todo.back());
      todo.pop_back();
      std::vector<std::string>& inner = depth == Depth::kTree ? todo : found.directories;
      visit(directory, [&](std::string name, bool is_directory) {
        (is_directory ? inner : found.files).push_back(std::move(name));
      });
    }
    std::sort(found.files.begin(), found.files.end());
    std::sort(found.directories.begin(), found.directories.end());
    return found;
  }

 private:
  // A root that does not exist has no files. A root that is a file or a broken link is an error,
  // because the user can't have meant that.
  void expect_usable_root() const {
    if (context_.try_open_root()) return;
    if (errno != ENOENT) fail("");
    const PosixRoot& root = context_.root_found();
    if (root.within == nullptr) refuse_broken_link(root.path, kWhat);
  }

  // The directory part of the prefix; nullopt if it is not a valid name, does not exist or is a
  // link.
  std::optional<std::string> start() const {
    const std::string directory(parent_name(prefix_));
    for (size_t begin = 0, end = 0; begin < directory.size(); begin = end + 1) {
      end = std::min(directory.find('/', begin), directory.size());
      const std::string component = directory.substr(begin, end - begin);
      if (component.empty() || component == "." || component == ".." ||
          component.find('\0') != std::string::npos) {
        return std::nullopt;
      }
      if (!open(directory.substr(0, end), O_PATH)) return std::nullopt;
    }
    if (directory.empty() && prefix_.starts_with('/')) return std::nullopt;
    return directory;
  }

  // Empty if the name is not a directory, or not any more.
  UniqueFd open(const std::string& directory, int flags) const {
    UniqueFd fd = context_.open_at_root(directory, flags | O_DIRECTORY | O_NOFOLLOW);
    if (!fd && errno != ENOENT && errno != ENOTDIR && errno != ELOOP) fail(directory);
    return fd;
  }

  [[noreturn]] void fail(const std::string& directory) const {
    fail_errno(kWhat, context_.path_of(directory), errno);
  }

  // Calls found(name, is_directory) for each entry of the directory whose name has the prefix.
  template <typename Found>
  void visit(const std::string& directory, const Found& found) const {
    UniqueFd fd = open(directory, O_RDONLY);
    if (!fd) return;
    const std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd.get()), ::closedir);
    if (stream == nullptr) fail(directory);
    fd.release();
    for (;;) {
      errno = 0;
      const dirent* const entry = ::readdir(stream.get());
      if (entry == nullptr && errno != 0) fail(directory);
      if (entry == nullptr) return;
      const std::string last = entry->d_name;
      if (last == "." || last == "..") continue;
      std::string name = directory.empty() ? last : directory + "/" + last;
      if (!name.starts_with(prefix_)) continue;
      const std::optional<bool> is_directory = kind(::dirfd(stream.get()), *entry);
      if (is_directory) found(std::move(name), *is_directory);
    }
  }

  // Whether an entry is a directory; nullopt if it has been removed meanwhile.
  static std::optional<bool> kind(int directory, const dirent& entry) {
    if (entry.d_type != DT_UNKNOWN) return entry.d_type == DT_DIR;
    struct stat info;
    if (::fstatat(directory, entry.d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) return std::nullopt;
    return S_ISDIR(info.st_mode);
  }

  static constexpr const char* kWhat = "cannot list a directory";
  PosixContext& context_;
  const std::string& prefix_;
};

constexpr const char* kFreshHint = "save to a directory that does not exist yet";

[[noreturn]] void fail_unsupported(PosixContext& context, const std::string& what,
                                   const std::string& name, int error) {
  throw Error(ErrorCode::kUnsupported, what + ": the file system does not support it")
      .with_file(context.path_of(name))
      .with_errno(error)
      .with_hint(kFreshHint);
}

bool means_unsupported(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == EXDEV ||
         error == EBUSY;  // a mount point
}

// Throws unless the entry is a directory: kNotFound if it does not exist, kUnsafe if it is a link,
// else kIo.
void expect_directory(PosixContext& context, const PosixEntry& entry, const std::string& name,
                      const std::string& what) {
  struct stat info;
  if (::fstatat(entry.directory.get(), entry.last.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    fail_errno(what, context.path_of(name), errno);
  }
  if (S_ISLNK(info.st_mode)) {
    throw Error(ErrorCode::kUnsafe, what + ": this is a symbolic link, not a directory")
        .with_file(context.path_of(name));
  }
  if (!S_ISDIR(info.st_mode)) fail_errno(what, context.path_of(name), ENOTDIR);
}

void sync_parents(PosixContext& context, const std::string& a, const std::string& b) {
  context.settle(std::string(parent_name(a)));
  if (parent_name(a) != parent_name(b)) context.settle(std::string(parent_name(b)));
}

// Tries an exchange in an empty directory. Returns 0 if it works, else an errno; means_unsupported
// tells whether that errno means that the file system can't exchange.
int try_exchange(System& system, int directory) {
  // A file system that treats the exchange as a plain rename would replace "b" with "a".
  if (::mkdirat(directory, "a", kDirectoryMode) != 0 ||
      ::mkdirat(directory, "a/in", kDirectoryMode) != 0 ||
      ::mkdirat(directory, "b", kDirectoryMode) != 0) {
    return errno;
  }
  if (system.rename_exchange(directory, "a/", directory, "b/") != 0) return errno;
  const bool swapped =
      ::faccessat(directory, "b/in", F_OK, 0) == 0 && ::faccessat(directory, "a", F_OK, 0) == 0;
  return swapped ? 0 : EOPNOTSUPP;
}

constexpr char kTrialPrefix[] = ".tilestone-probe-";

void remove_trial(int root, const std::string& name) {
  for (const char* inner : {"/a/in", "/b/in", "/a", "/b", ""}) {
    ::unlinkat(root, (name + inner).c_str(), AT_REMOVEDIR);
  }
}

// Removes the directories of trials whose processes were killed. A running trial takes much less
// than kOld.
void remove_old_trials(PosixContext& context, int root) {
  constexpr time_t kOld = 3600;  // seconds
  for (const std::string& name : posix_list(context, kTrialPrefix, Depth::kLevel).directories) {
    struct stat info, now;
    if (::fstatat(root, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        ::fstat(root, &now) == 0 && now.st_mtime - info.st_mtime > kOld) {
      remove_trial(root, name);
    }
  }
}

}  // namespace

Listing posix_list(PosixContext& context, const std::string& prefix, Depth depth) {
  return DirectoryListing(context, prefix).read(depth);
}

// Another process may remove a directory, while it is empty, before the file is made.
UniqueFd posix_open_new(PosixContext& context, const std::string& name, int flags, bool again) {
  for (int tries = 1;; ++tries) {
    UniqueFd fd = context.open_at_root(name, flags, kFileMode);
    if (fd || errno != ENOENT || tries == kMaxTries) return fd;
    if (!again && context.root_was_there() && !context.try_open_root()) return {};
    make_directories(context, std::string(parent_name(name)), false);
  }
}

void posix_make_directory(PosixContext& context, const std::string& name) {
  check_directory_name(name);
  make_directories(context, name, false);
}

void posix_remove_directory(PosixContext& context, const std::string& name) {
  constexpr const char* kWhat = "cannot remove a directory";
  const PosixEntry entry = context.locate(name, kWhat);
  if (::unlinkat(entry.directory.get(), entry.last.c_str(), AT_REMOVEDIR) == 0) return;
  // Both errnos mean that it is not empty, but EEXIST would become kAlreadyExists.
  fail_errno(kWhat, context.path_of(name), errno == EEXIST ? ENOTEMPTY : errno);
}

bool posix_can_exchange(PosixContext& context, const std::string& in) {
  TrialResult& result = context.exchange();
  if (const auto known = result.get()) return *known;
  const UniqueFd root = context.open_at_root(in, O_PATH | O_DIRECTORY);
  if (!root) return false;
  std::random_device random;
  char number[24];
  std::snprintf(number, sizeof number, "%08x%08x", random(), random());
  const std::string name = kTrialPrefix + std::string(number);
  if (::mkdirat(root.get(), name.c_str(), kDirectoryMode) != 0) return false;
  if (in.empty()) remove_old_trials(context, root.get());
  const UniqueFd directory(::openat(root.get(), name.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  const int error = directory ? try_exchange(context.system(), directory.get()) : errno;
  remove_trial(root.get(), name);
  if (error == 0 || means_unsupported(error)) result.set(error == 0);
  return error == 0;
}

void posix_exchange(PosixContext& context, const std::string& a, const std::string& b) {
  const std::string what = "cannot exchange the directories \"" + a + "\" and \"" + b + "\"";
  const PosixEntry one = context.locate(a, what), two = context.locate(b, what);
  check_apart(a, b, what);
  expect_directory(context, one, a, what);
  expect_directory(context, two, b, what);
  posix_can_exchange(context, b);
  if (!context.exchange().get().value_or(true)) fail_unsupported(context, what, a, EOPNOTSUPP);
  // The trailing slash makes the kernel refuse a name that has become a link or a file meanwhile.
  if (context.system().rename_exchange(one.directory.get(), (one.last + "/").c_str(),
                                       two.directory.get(), (two.last + "/").c_str()) != 0) {
    if (means_unsupported(errno)) fail_unsupported(context, what, a, errno);
    fail_errno(what, context.path_of(a), errno);
  }
  sync_parents(context, a, b);
}

void posix_rename_directory(PosixContext& context, const std::string& from, const std::string& to) {
  const std::string what = "cannot rename the directory \"" + from + "\" to \"" + to + "\"";
  const PosixEntry old_entry = context.locate(from, what), new_entry = context.locate(to, what);
  check_apart(from, to, what);
  expect_directory(context, old_entry, from, what);
  if (::renameat(old_entry.directory.get(), (old_entry.last + "/").c_str(),
                 new_entry.directory.get(), (new_entry.last + "/").c_str()) != 0) {
    if (errno == ENOTEMPTY || errno == EEXIST || errno == ENOTDIR) {
      fail_errno(what, context.path_of(to), EEXIST);
    }
    if (errno == EXDEV || errno == EBUSY) fail_unsupported(context, what, from, errno);
    fail_errno(what, context.path_of(from), errno);
  }
  sync_parents(context, from, to);
}

bool posix_link(PosixContext& other, const std::string& from, PosixContext& context,
                const std::string& name) {
  constexpr const char* kWhat = "cannot link a file";
  check_file_name(from);
  check_file_name(name);
  const auto [above, last] = split_name(from);
  const std::string old_last(last);
  const UniqueFd old_dir = other.open_at_root(std::string(above), O_PATH | O_DIRECTORY);
  struct stat info;
  const auto is_file = [&] {
    return ::fstatat(old_dir.get(), old_last.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
           S_ISREG(info.st_mode);
  };
  if (!old_dir || !is_file()) return false;
  make_directories(context, std::string(parent_name(name)), false);
  const PosixEntry entry = context.locate(name, kWhat);
  if (::linkat(old_dir.get(), old_last.c_str(), entry.directory.get(), entry.last.c_str(), 0) ==
      0) {
    return true;
  }
  if (errno == ENOENT) return false;
  if (errno == EEXIST || errno == EIO || errno == ENOSPC || errno == EDQUOT) {
    fail_errno(kWhat, context.path_of(name), errno);
  }
  // Without the folders, which are others at each save.
  log_once(LogLevel::kWarning,
           std::string("files can't be linked from one directory to another: ") +
               std::strerror(errno) + "; they are written");
  return false;
}

bool posix_is_link(PosixContext& context, const std::string& name) {
  const auto [above, last] = split_name(name);
  const UniqueFd directory = context.open_at_root(std::string(above), O_PATH | O_DIRECTORY);
  struct stat info;
  return directory &&
         ::fstatat(directory.get(), std::string(last).c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISLNK(info.st_mode);
}

std::string posix_resolved_root(const PosixContext& context) {
  for (const PosixContext* outer = &context; outer != nullptr;) {
    if (outer->root_found().held) return {};  // the directory may have been moved
    outer = outer->root_found().within.get();
  }
  std::string missing;  // with a slash in front
  for (std::string path = context.root();;) {
    const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), ::free);
    if (real != nullptr) {
      const std::string found = real.get();
      return found == "/" && !missing.empty() ? missing : found + missing;
    }
    struct stat info;  // a broken link can't be resolved
    if (errno != ENOENT || ::lstat(path.c_str(), &info) == 0) return {};
    const auto [above, last] = split_name(path);
    if (last.empty() || last == "." || last == "..") return {};
    missing = "/" + std::string(last) + missing;
    if (above.empty() && path.front() == '/') return missing;
    path = above.empty() ? "." : std::string(above);
  }
}

}  // namespace tilestone
