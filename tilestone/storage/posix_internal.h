// The parts of the POSIX storage: what its files share, its writer and its reader.
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

// Of memory and file ranges under direct I/O, in bytes.
inline constexpr uint64_t kAlignment = BufferPool::kAlignment;

// Files from this size on, and ranges from kDirectRead on, are worth direct I/O.
inline constexpr uint64_t kDirectWrite = 1u << 20;  // bytes
inline constexpr uint64_t kDirectRead = 16u << 10;

// A storage over other system calls than the real ones.
std::shared_ptr<Storage> posix_storage(const std::string& root, const PosixOptions& options,
                                       std::shared_ptr<System> system);

// Which way of reading uncached ranges is faster differs between machines: direct reads win by up
// to a factor of ten, or lose by a third. A large read tries both: the first kWindow bytes go
// directly, the next through the page cache, and so on through the cache for as long as each window
// is clearly faster than the direct one was. The first that is late ends that for the life of the
// storage. Only the speed depends on the choice. Thread-safe. Times are in seconds since any fixed
// moment.
class ReadChoice {
 public:
  static constexpr uint64_t kWindow = 64u << 20;  // bytes
  static constexpr uint64_t kWorthTrying = uint64_t{2} << 30;
  static constexpr double kClearly = 1.15;  // how much faster the page cache must be

  // A batch of `bytes` begins.
  void begin(uint64_t bytes);
  bool pick_direct();  // for the next uncached piece
  void started(bool direct, double now);
  void finished(uint64_t bytes, bool direct, double now);

 private:
  enum class Phase : uint8_t { kUntried, kDirect, kDraining, kCached, kDone };
  std::mutex mutex_;
  Phase phase_ = Phase::kUntried;
  uint64_t bytes_ = 0;           // finished in this window
  std::optional<double> since_;  // when the window began; with its first piece, where not known
  double direct_rate_ = 0;       // bytes a second
  uint64_t direct_under_way_ = 0;
};

class PosixContext;

// How a storage's root directory is found, which it is for every call anew: it may be replaced.
struct PosixRoot {
  std::string path;                      // for people; opened where the rest is empty
  std::shared_ptr<PosixContext> within;  // the root is directory `name` of that one's root, and
  std::string name;                      // found through no link that leads out of it
  UniqueFd held;                         // the root is this directory, open
};

// The directory that holds a name, and the name in it.
struct PosixEntry {
  UniqueFd directory;
  std::string last;
};

// An answer, once it is known. Thread-safe.
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

// What the files of one storage share. Thread-safe. A child of fork has queues of its own: the
// parent's are shared memory between the parent and the kernel.
class PosixContext {
 public:
  PosixContext(PosixRoot root, const PosixOptions& options, std::shared_ptr<System> system);

  const std::string& root() const { return root_.path; }
  const PosixRoot& root_found() const { return root_; }
  // How a person would name a file of the storage; the root for "". For errors.
  std::string path_of(const std::string& name) const;
  const PosixOptions& options() const { return options_; }
  System& system() { return *system_; }
  const std::shared_ptr<System>& shared_system() const { return system_; }

  ReadChoice& read_choice() { return own_->read_choice; }

  // Whether the file system can exchange two directories, once that was tried.
  TrialResult& exchange() { return exchange_; }
  // As the functions of System, for file systems too that keep a file's pages elsewhere than with
  // the file that is open (overlayfs): there the quick way to ask finds none.
  int cached_bytes(int fd, uint64_t offset, uint64_t size, uint64_t& bytes);

  // A queue for one thread; give it back idle, or destroy it.
  std::unique_ptr<IoQueue> take_queue();
  void give_back(std::unique_ptr<IoQueue> queue);

  // Turns direct I/O on for an open file; false, and a line in the log, where it is refused.
  bool make_direct(int fd);
  void note_no_direct(int error);

  // The root directory, opened with O_PATH. Empty and errno on failure.
  UniqueFd try_open_root() const;
  // Opens `name` ("": the root), checked by the caller, through links that stay beneath the root.
  // Empty and errno on failure.
  UniqueFd open_at_root(const std::string& name, int flags, unsigned mode = 0) const;
  // Where `name` is, or would be made; "what: ..." on failure.
  PosixEntry locate(const std::string& name, const std::string& what) const;
  void sync_directory(const std::string& name);

  // Opens `name`, which the caller has checked, for reading or with O_PATH; through links as the
  // options say. Empty and errno on failure.
  UniqueFd open_to_read(const std::string& name, int flags) const;

 private:
  struct Own {
    ReadChoice read_choice;
    std::mutex mutex;
    std::vector<std::unique_ptr<IoQueue>> idle;
    bool uring = true;  // worth a try
  };

  PosixRoot root_;
  PosixOptions options_;
  std::shared_ptr<System> system_;
  TrialResult exchange_, pages_hidden_;
  PerProcess<Own> own_{[] { return std::make_unique<Own>(); }};
};

// Appends to `fd`, a new and empty file.
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
  int direct_fd() const;  // for O_DIRECT; -1 where that is not available
  void forget_direct() const { direct_refused_ = true; }

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

// Locks `fd`, open for writing; null when somebody else holds the lock.
std::unique_ptr<StorageLock> posix_try_lock(System& system, UniqueFd fd, const std::string& name);
bool posix_is_locked(int fd, const std::string& name);

// As the functions of Storage (posix_directories.cc).
std::vector<std::string> posix_list(PosixContext& context, const std::string& prefix);
std::vector<std::string> posix_list_files(PosixContext& context, const std::string& prefix);
std::vector<std::string> posix_list_directories(PosixContext& context, const std::string& prefix);
void posix_make_directory(PosixContext& context, const std::string& name);
void posix_remove_directory(PosixContext& context, const std::string& name);
void posix_exchange(PosixContext& context, const std::string& a, const std::string& b);
void posix_rename_directory(PosixContext& context, const std::string& from, const std::string& to);
bool posix_can_exchange(PosixContext& context);
bool posix_is_link(PosixContext& context, const std::string& name);
// The root's path, absolute and without links; empty where that can't be known. What is not there
// yet is taken as it is written.
std::string posix_resolved_root(const PosixContext& context);

void posix_read(PosixContext& context, std::span<const ReadOp> ops, const ReadOptions& options,
                const ReadDone& done);
// As Storage::prefetch.
uint64_t posix_prefetch(PosixContext& context, std::span<const ReadOp> ops,
                        const ReadOptions& options);

}  // namespace tilestone
