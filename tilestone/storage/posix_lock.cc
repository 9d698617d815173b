// Locks of open files (fcntl, F_OFD_...). A process can check such a lock without taking it, so
// checking never makes somebody else's claim fail.
//
// The lock belongs to the open file, which a forked child shares. The child would keep the lock
// after the parent's death, so every child closes the lock files right after the fork.
//
// The file says who holds the lock and since when, for people. What is in a file that nobody has
// locked was left by a process that died.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <list>
#include <mutex>
#include <string>
#include <system_error>

#include "tilestone/base/error.h"
#include "tilestone/base/host.h"
#include "tilestone/storage/posix_internal.h"

namespace tilestone {
namespace {

struct flock whole_file(short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;  // l_start and l_len are 0: the whole file, whatever its length
}

// The files of the locks that this process holds. Never destroyed, because a fork may happen at any
// time.
struct HeldLock {
  std::mutex mutex;
  std::list<UniqueFd> files;
};

HeldLock& held() {
  static HeldLock* const the_held = [] {
    auto* const made = new HeldLock;
    // The fork takes the mutex, so that the child finds the list in a consistent state.
    ::pthread_atfork([] { held().mutex.lock(); }, [] { held().mutex.unlock(); },
                     [] {
                       for (UniqueFd& file : held().files) file = UniqueFd();
                       held().mutex.unlock();
                     });
    return made;
  }();
  return *the_held;
}

// The lock holds without the text too, for example on a full disk.
void write_text(int fd, const std::string& text) {
  const auto size = static_cast<ssize_t>(text.size());
  if (::pwrite(fd, text.data(), text.size(), 0) == size && ::ftruncate(fd, size) == 0) return;
  log(LogLevel::kDebug, std::string("the lock file does not say who holds it: ") +
                            std::generic_category().message(errno));
}

class PosixLock : public StorageClaim {
 public:
  explicit PosixLock(UniqueFd fd) {
    write_text(fd.get(), this_process());
    const std::lock_guard lock(held().mutex);
    at_ = held().files.insert(held().files.end(), std::move(fd));
  }
  ~PosixLock() override {
    const std::lock_guard lock(held().mutex);
    // Unlock explicitly: a child that has just been forked may still share the open file. A child
    // must not unlock: its file is closed already, or the lock belongs to its parent.
    if (*at_ && process_ == ::getpid()) {
      write_text(at_->get(), "");
      struct flock unlock = whole_file(F_UNLCK);
      ::fcntl(at_->get(), F_OFD_SETLK, &unlock);
    }
    held().files.erase(at_);
  }

 private:
  const pid_t process_ = ::getpid();
  std::list<UniqueFd>::iterator at_;
};

// Whether the errno means that files can't be locked: no lock server, a mount option or an old
// kernel.
bool means_no_locks(int error) {
  return error == ENOSYS || error == ENOLCK || error == EOPNOTSUPP || error == EINVAL;
}

[[noreturn]] void fail_no_locks(const std::string& name) {
  throw Error(ErrorCode::kUnsupported, "this file system does not support file locks")
      .with_file(name)
      .with_errno(errno);
}

}  // namespace

std::unique_ptr<StorageClaim> posix_claim(System& system, UniqueFd fd, const std::string& name) {
  held();  // installs the fork handlers before the lock is taken
  int result;
  do {
    result = system.lock(fd.get());
  } while (result != 0 && errno == EINTR);
  if (result == 0) return std::make_unique<PosixLock>(std::move(fd));
  if (errno == EAGAIN || errno == EACCES) return nullptr;
  if (means_no_locks(errno)) fail_no_locks(name);
  fail_errno("cannot take a lock", name, errno);
}

bool posix_is_locked(int fd, const std::string& name) {
  struct flock lock = whole_file(F_WRLCK);
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) {
    if (means_no_locks(errno)) fail_no_locks(name);
    fail_errno("cannot check a lock", name, errno);
  }
  return lock.l_type != F_UNLCK;
}

}  // namespace tilestone
