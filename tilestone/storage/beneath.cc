#include "tilestone/storage/beneath_internal.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <string_view>
#include <vector>

namespace tilestone {
namespace {

constexpr int kMaxLinks = 40;  // the kernel's own limit
constexpr int kMaxRaces = 100;

// Puts the components of `path` in front of `todo`.
void prepend_components(const std::string& path, std::deque<std::string>& todo) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string part = path.substr(begin, end - begin);
    if (!part.empty() && part != ".") parts.push_back(part);
    begin = end + 1;
  }
  todo.insert(todo.begin(), parts.begin(), parts.end());
}

// The target of a link in a directory; "": it is none.
std::string target_of(int directory, const std::string& link) {
  std::string target(PATH_MAX, '\0');
  const ssize_t size = ::readlinkat(directory, link.c_str(), target.data(), target.size());
  target.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return target;
}

// The open directories from the root down to the current directory of a walk.
class NameWalk {
 public:
  explicit NameWalk(int root) { path_.emplace_back(openat(root, ".", O_PATH | O_CLOEXEC)); }
  int here() const { return path_.back().get(); }
  bool enter(const std::string& name) {
    UniqueFd next(openat(here(), name.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!next) return false;
    path_.push_back(std::move(next));
    return true;
  }
  bool leave() {
    if (path_.size() == 1) {
      errno = EXDEV;
      return false;
    }
    path_.pop_back();
    return true;
  }

 private:
  std::vector<UniqueFd> path_;
};

// The path of an open file or directory; empty if the system does not report it.
std::string path_of(int fd) { return target_of(AT_FDCWD, "/proc/self/fd/" + std::to_string(fd)); }

// Whether `file` is in a directory "blobs" next to `root` or next to a directory above it.
bool in_hub(const std::string& root, const std::string& file) {
  constexpr std::string_view kBlobs = "/blobs/";
  const size_t last = file.rfind('/');
  if (last == std::string::npos || last + 1 < kBlobs.size()) return false;
  const size_t blobs = last + 1 - kBlobs.size();
  if (file.compare(blobs, kBlobs.size(), kBlobs) != 0) return false;
  return root.starts_with(file.substr(0, blobs) + "/");
}

// Whether `file` is in `root`, to which an absolute link may lead back.
bool is_in(const std::string& root, const std::string& file) {
  return !root.empty() && file.starts_with(root.ends_with('/') ? root : root + "/");
}

}  // namespace

UniqueFd open_linked(int root, const std::string& name, int flags, bool any) {
  // Opened for reading only when known to be a regular file: opening a device can have effects.
  const UniqueFd found(::openat(root, name.c_str(), O_PATH | O_CLOEXEC));
  struct stat info;
  if (!found || ::fstat(found.get(), &info) != 0) return {};
  const std::string from = path_of(root), to = path_of(found.get());
  if (!S_ISREG(info.st_mode) || (!any && !is_in(from, to) && !in_hub(from, to))) {
    errno = EXDEV;
    return {};
  }
  const std::string link = "/proc/self/fd/" + std::to_string(found.get());
  return UniqueFd(::open(link.c_str(), flags | O_CLOEXEC));
}

UniqueFd::~UniqueFd() {
  if (fd_ >= 0) ::close(fd_);
}

bool clear_nonblocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) == 0;
}

UniqueFd walk_beneath(int root, const std::string& name, int flags, unsigned mode) {
  std::deque<std::string> todo;
  prepend_components(name, todo);
  NameWalk walk(root);
  int links = 0;
  const bool exclusive = (flags & O_EXCL) != 0;
  while (!todo.empty()) {
    const std::string part = todo.front();
    todo.pop_front();
    if (part == "..") {
      if (!walk.leave()) return {};
      continue;
    }
    const std::string target = todo.empty() && exclusive
                                   ? std::string()
                                   : target_of(walk.here(), part);  // O_EXCL follows no link
    if (!target.empty()) {
      if (target.front() == '/' || ++links > kMaxLinks) {
        errno = target.front() == '/' ? EXDEV : ELOOP;
        return {};
      }
      prepend_components(target, todo);
      continue;
    }
    if (todo.empty()) {
      return UniqueFd(openat(walk.here(), part.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, mode));
    }
    if (!walk.enter(part)) return {};
  }
  return UniqueFd(openat(walk.here(), ".", flags | O_CLOEXEC, mode));
}

UniqueFd open_beneath(System& system, int root, const std::string& name, int flags, unsigned mode) {
  const std::string path = name.empty() ? "." : name;
  int fd = -1;
  // EAGAIN: something was renamed while the kernel walked the path.
  for (int race = 0; race < kMaxRaces; ++race) {
    fd = system.open_beneath(root, path.c_str(), flags, mode);
    if (fd >= 0 || (errno != EAGAIN && errno != EINTR)) break;
  }
  if (fd < 0 && (errno == ENOSYS || errno == EPERM)) return walk_beneath(root, path, flags, mode);
  return UniqueFd(fd);
}

}  // namespace tilestone
