// Locks of open files (fcntl, F_OFD_...): one that somebody holds can be seen without taking it, so
// that who only looks disturbs nobody.
//
// Such a lock belongs to the open file, which a forked child shares: the child would keep it alive
// after its parent's death. So every child closes the locks' files as it begins.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <list>
#include <mutex>

#include "tilestone/base/error.h"
#include "tilestone/storage/posix_internal.h"

namespace tilestone {
namespace {

struct flock whole_file(short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;  // from 0 to the end, wherever that is
}

// The files of the locks that this process holds. Never destroyed: a fork may come at any time.
struct HeldLock {
  std::mutex mutex;
  std::list<UniqueFd> files;
};

HeldLock& held() {
  static HeldLock* const the_held = [] {
    auto* const made = new HeldLock;
    // The mutex is taken around the fork, so that the child finds the list whole.
    ::pthread_atfork([] { held().mutex.lock(); }, [] { held().mutex.unlock(); },
                     [] {
                       for (UniqueFd& file : held().files) file = UniqueFd();
                       held().mutex.unlock();
                     });
    return made;
  }();
  return *the_held;
}

class PosixLock : public StorageLock {
 public:
  explicit PosixLock(UniqueFd fd) {
    const std::lock_guard lock(held().mutex);
    at_ = held().files.insert(held().files.end(), std::move(fd));
  }
  ~PosixLock() override {
    const std::lock_guard lock(held().mutex);
    // Unlocked explicitly, since a child that has just been forked may still share the open file.
    // In a child itself the file is closed, or was never its own.
    if (*at_ && process_ == ::getpid()) {
      struct flock unlock = whole_file(F_UNLCK);
      ::fcntl(at_->get(), F_OFD_SETLK, &unlock);
    }
    held().files.erase(at_);
  }

 private:
  const pid_t process_ = ::getpid();
  std::list<UniqueFd>::iterator at_;
};

// No server for locks, or a mount option, or an old kernel.
bool says_no_locks(int error) {
  return error == ENOSYS || error == ENOLCK || error == EOPNOTSUPP || error == EINVAL;
}

[[noreturn]] void fail_no_locks(const std::string& name) {
  throw Error(ErrorCode::kUnsupported, "files can't be locked on this file system")
      .with_file(name)
      .with_errno(errno);
}

}  // namespace

std::unique_ptr<StorageLock> posix_try_lock(System& system, UniqueFd fd, const std::string& name) {
  held();  // a fork between locking and noting it is prepared for by the destructor alone
  int result;
  do {
    result = system.lock(fd.get());
  } while (result != 0 && errno == EINTR);
  if (result == 0) return std::make_unique<PosixLock>(std::move(fd));
  if (errno == EAGAIN || errno == EACCES) return nullptr;
  if (says_no_locks(errno)) fail_no_locks(name);
  fail_errno("cannot take a lock", name, errno);
}

bool posix_is_locked(int fd, const std::string& name) {
  struct flock lock = whole_file(F_WRLCK);
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) {
    if (says_no_locks(errno)) fail_no_locks(name);
    fail_errno("cannot look at a lock", name, errno);
  }
  return lock.l_type != F_UNLCK;
}

}  // namespace tilestone
