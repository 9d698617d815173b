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

// The smallest file that is written, and the smallest range that is read, by direct I/O.
inline constexpr uint64_t kDirectWrite = 1u << 20;  // bytes
inline constexpr uint64_t kDirectRead = 16u << 10;  // bytes

// A storage that makes its system calls through `system`, for tests.
std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options,
                                       std::shared_ptr<System> system);

// Chooses how to read uncached ranges: directly or through the page cache. Which one is faster
// depends on the machine: direct reads can be up to ten times as fast, or a third slower. A large
// read tries both. The first kWindow bytes are read directly, the next kWindow bytes through the
// page cache. It keeps using the cache while each window is at least kClearly times as fast as the
// direct one. The first slower window makes the storage read directly for the rest of its life.
// The choice affects only the speed. Thread-safe. Times are in seconds since any fixed moment.
class ReadChoice {
 public:
  static constexpr uint64_t kWindow = 64u << 20;               // bytes
  static constexpr uint64_t kWorthTrying = uint64_t{2} << 30;  // bytes; smaller reads try nothing
  static constexpr double kClearly = 1.15;  // how many times as fast the page cache must be

  // Call when a batch of `bytes` begins.
  void begin(uint64_t bytes);
  bool pick_direct();  // whether to read the next uncached block directly
  void started(bool direct, double now);
  void finished(uint64_t bytes, bool direct, double now);

 private:
  enum class Phase : uint8_t { kUntried, kDirect, kDraining, kCached, kDone };
  std::mutex mutex_;
  Phase phase_ = Phase::kUntried;
  uint64_t bytes_ = 0;           // finished in this window
  std::optional<double> since_;  // when the window began; empty: set when its first block starts
  double direct_rate_ = 0;       // bytes per second
  uint64_t direct_under_way_ = 0;
};

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

  ReadChoice& read_choice() { return own_->read_choice; }
  // Whether CachePolicy::kAuto keeps. Known after the first trial (keep_trial_internal.h).
  TrialResult& keeping() { return keeping_; }

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
  bool stands() const;  // see Storage::stands
  // Opens `name` ("": the root), which the caller has checked. Follows links that stay beneath the
  // root. Empty, with errno set, on failure.
  UniqueFd open_at_root(const std::string& name, int flags, unsigned mode = 0) const;
  // Opens the directory of `name`, which need not exist itself. Throws Error "what: ..." on
  // failure.
  PosixEntry locate(const std::string& name, const std::string& what) const;
  void sync_directory(const std::string& name);

  // Opens `name`, which the caller has checked, for reading or with O_PATH. Follows links as
  // PosixOptions::links says. Empty, with errno set, on failure.
  UniqueFd open_to_read(const std::string& name, int flags) const;

 private:
  struct Own {
    ReadChoice read_choice;
    std::mutex mutex;
    std::vector<std::unique_ptr<IoQueue>> idle;
    bool uring = true;  // false: the kernel has refused io_uring
  };

  PosixRoot root_;
  PosixOptions options_;
  std::shared_ptr<System> system_;
  TrialResult exchange_, pages_hidden_, keeping_;
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
std::unique_ptr<StorageLock> posix_try_lock(System& system, UniqueFd fd, const std::string& name);
bool posix_is_locked(int fd, const std::string& name);

// These functions implement the functions of Storage with the same names (posix_directories.cc).
std::vector<std::string> posix_list(PosixContext& context, const std::string& prefix);
std::vector<std::string> posix_list_files(PosixContext& context, const std::string& prefix);
std::vector<std::string> posix_list_directories(PosixContext& context, const std::string& prefix);
void posix_make_directory(PosixContext& context, const std::string& name);
void posix_remove_directory(PosixContext& context, const std::string& name);
void posix_exchange(PosixContext& context, const std::string& a, const std::string& b);
void posix_rename_directory(PosixContext& context, const std::string& from, const std::string& to);
// Tries it in the directory `in` ("": the root) if it is not known yet.
bool posix_can_exchange(PosixContext& context, const std::string& in = "");
bool posix_is_link(PosixContext& context, const std::string& name);
// The root's absolute path without links; empty if it can't be determined. Trailing components that
// do not exist yet are kept as written.
std::string posix_resolved_root(const PosixContext& context);

void posix_read(PosixContext& context, std::span<const ReadOp> ops, const ReadOptions& options,
                const ReadDone& done);
// Implements Storage::prefetch.
uint64_t posix_prefetch(PosixContext& context, std::span<const ReadOp> ops,
                        const ReadOptions& options);

}  // namespace tilestone
