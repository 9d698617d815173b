// The parts of the POSIX storage: the state that its files share, its writer and its reader.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/per_process.h"
#include "tilestone/storage/beneath_internal.h"
#include "tilestone/storage/posix_storage.h"
#include "tilestone/storage/system_internal.h"

namespace tilestone {

// Direct I/O requires this alignment, in bytes, of memory addresses, file offsets and sizes.
inline constexpr uint64_t kAlignment = BufferPool::kAlignment;

// A storage that makes its system calls through `system`, for tests.
std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options,
                                       std::shared_ptr<System> system);

class PosixContext;

// How to find a storage's root directory. Every call opens the root anew, because the directory may
// be replaced meanwhile. Uses `held` if set, else `within` and `name` if set, else `path`.
struct PosixRoot {
  std::string path;                      // shown to people; opened only if the rest is empty
  std::shared_ptr<PosixContext> within;  // the root is the directory `name` in this one's root;
  std::string name;                      // links on the way must not leave that root
  UniqueFd held;                         // the root is this open directory
  std::shared_ptr<PosixContext> held_from = nullptr;  // whose root `held` was when it was opened
};

// An open directory and the name of an entry in it.
struct PosixEntry {
  UniqueFd directory;
  std::string last;
};

// A yes-or-no answer that may not be known yet. Thread-safe.
class TrialResult {
 public:
  std::optional<bool> get() const {
    const int known = known_;
    return known < 0 ? std::nullopt : std::optional(known > 0);
  }
  void set(bool can) { known_ = can ? 1 : 0; }

 private:
  std::atomic<int> known_ = -1;
};

// The state that the files of one storage share. Thread-safe. A forked child gets its own I/O
// queues, because the parent's queues are memory that the parent shares with the kernel.
class PosixContext {
 public:
  PosixContext(PosixRoot root, const PosixOptions& options, std::shared_ptr<System> system);

  const std::string& root() const { return root_.path; }
  const PosixRoot& root_found() const { return root_; }
  // The path of a file of the storage, for error messages. "" is the root.
  std::string path_of(const std::string& name) const;
  const PosixOptions& options() const { return options_; }
  System& system() { return *system_; }
  const std::shared_ptr<System>& shared_system() const { return system_; }

  // Whether the file system can exchange two directories. Known after the first trial.
  TrialResult& exchange() { return exchange_; }
  // Like System::cached_bytes. It also works on file systems (overlayfs) whose open files do not
  // own the cached pages, where System::cached_bytes finds none: it then uses resident_bytes.
  int cached_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes);

  // Returns a queue for one thread. Give it back when it is idle, or destroy it.
  std::unique_ptr<IoQueue> take_queue();
  void give_back(std::unique_ptr<IoQueue> queue);

  // Turns on direct I/O for an open file. If the file system refuses, logs it and returns false.
  bool make_direct(int fd);
  void note_no_direct(int error);  // logs once that direct I/O was refused

  // Opens the root directory with O_PATH. Empty, with errno set, on failure.
  UniqueFd try_open_root() const;
  bool root_was_there() const { return root_was_there_; }  // some time before
  bool stands() const;                                     // see Directories::stands
  // Opens `name` ("": the root), which the caller has checked. Follows links that stay beneath the
  // root. Empty, with errno set, on failure.
  UniqueFd open_at_root(const std::string& name, int flags, unsigned mode = 0) const;
  // Opens the directory of `name`, which need not exist itself. Throws Error "what: ..." on
  // failure.
  PosixEntry locate(const std::string& name, const std::string& what) const;
  void settle(const std::string& name);

  // Opens `name`, which the caller has checked, for reading or with O_PATH. Follows links as
  // PosixOptions::links says. Empty, with errno set, on failure.
  UniqueFd open_to_read(const std::string& name, int flags) const;

 private:
  struct Own {
    std::mutex mutex;
    std::vector<std::unique_ptr<IoQueue>> idle;
    bool uring = true;  // false: the kernel has refused io_uring
  };

  PosixRoot root_;
  PosixOptions options_;
  std::shared_ptr<System> system_;
  TrialResult exchange_, pages_hidden_;
  mutable std::atomic<bool> root_was_there_ = false;
  PerProcess<Own> own_{[] { return std::make_unique<Own>(); }};
};

// A writer that appends to `fd`, a new and empty file.
std::unique_ptr<WritableFile> posix_writer(std::shared_ptr<PosixContext> context, std::string name,
                                           UniqueFd fd, uint64_t expected_size);

class PosixReadable : public ReadableFile {
 public:
  PosixReadable(std::shared_ptr<PosixContext> context, std::string name, UniqueFd fd, uint64_t size)
      : context_(std::move(context)), name_(std::move(name)), fd_(std::move(fd)), size_(size) {}
  uint64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

  PosixContext& context() const { return *context_; }
  int fd() const { return fd_.get(); }
  int direct_fd() const;  // open with O_DIRECT; -1 if direct I/O is not available
  void forget_direct() const { direct_refused_ = true; }  // direct_fd() returns -1 from now on

 private:
  UniqueFd open_direct() const;

  std::shared_ptr<PosixContext> context_;
  std::string name_;
  UniqueFd fd_;
  uint64_t size_;
  mutable std::once_flag once_;
  mutable UniqueFd direct_fd_;
  mutable std::atomic<bool> direct_refused_ = false;
};

// Locks `fd`, which must be open for writing. Null if somebody else holds the lock.
std::unique_ptr<StorageClaim> posix_claim(System& system, UniqueFd fd, const std::string& name);
bool posix_is_locked(int fd, const std::string& name);

// These functions implement those of Storage and Directories (posix_directories.cc).
Listing posix_list(PosixContext& context, const std::string& prefix, Depth depth);
// Opens a file with O_CREAT and the other flags. Makes the directories of the name that do not
// exist. A root that has gone is made again only with `again`. Empty, with errno set, on failure;
// throws if a directory can't be made.
UniqueFd posix_open_new(PosixContext& context, const std::string& name, int flags, bool again);
void posix_make_directory(PosixContext& context, const std::string& name);
void posix_remove_directory(PosixContext& context, const std::string& name);
void posix_exchange(PosixContext& context, const std::string& a, const std::string& b);
void posix_rename_directory(PosixContext& context, const std::string& from, const std::string& to);
// Tries it in the directory `in` ("": the root) if it is not known yet.
bool posix_can_exchange(PosixContext& context, const std::string& in = "");
bool posix_is_link(PosixContext& context, const std::string& name);
// See Storage::link(); `from` is a file of another storage.
bool posix_link(PosixContext& other, const std::string& from, PosixContext& context,
                const std::string& name);
// The root's absolute path without links; empty if it can't be determined. Trailing components that
// do not exist yet are kept as written.
std::string posix_resolved_root(const PosixContext& context);

void posix_read(PosixContext& context, std::span<const ReadOp> ops, const ReadOptions& options,
                const ReadDone& done);

}  // namespace tilestone
