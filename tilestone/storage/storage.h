// Storage: named files under one root. Knows names and byte ranges, nothing of tensors.
//
// Names are relative paths with '/' between components ("__0_0.distcp", "sub/a"). A name that is
// empty, absolute, holds NUL or a "." or ".." component, or leaves the root through a symbolic
// link is refused with Error(kUnsafe); so is opening anything that is not a regular file.
// Every failure is an Error with the file's name, the system's errno (kIo; kNotFound and
// kAlreadyExists where that is what happened) and a message that says what was being done.
//
// All calls are thread-safe; one WritableFile is used by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/file_name.h"

namespace tilestone {

class ThreadPool;

// What a storage may be able to do, and who asks. What every storage must do is not among them: a
// publish is one step, and create refuses a name that is taken.
enum class StorageCapability : uint8_t {
  // What a process prefetches, others on its host read from memory. A load asks: without, ranks on
  // one host exchange messages.
  kSharedCache,
  // exchange_directories swaps two directories in one step. A save asks that replaces a checkpoint
  // whose describing files can't be switched by one publish: without, it refuses.
  kExchange,
};

// What reading costs beside the bytes: each as the bytes that could be read in the same time. Who
// plans reads weighs with them; the default is for disks and file servers.
struct ReadCosts {
  uint64_t gap_bytes = 3072;           // ranges of one file that are this near are read as one
  uint64_t request_bytes = 64u << 10;  // a further range
  uint64_t open_bytes = 128u << 10;    // a further file: what it is, and where
};

// A new file that is appended to and made durable once. Destroying it without close() leaves what
// was written so far, of no stated length or durability.
class WritableFile {
 public:
  virtual ~WritableFile() = default;

  // Appends the buffer's view(); takes the buffer and may return before its bytes are written, so
  // that several are under way. A failure of an earlier append may surface here. Buffers go back
  // to their pool as they are written, whatever the caller does meanwhile.
  // Under direct I/O every append but the last should be a multiple of BufferPool::kAlignment
  // bytes; the bytes after one that is not go through the page cache.
  virtual void append(Buffer buffer) = 0;
  // The same for a few bytes that the caller keeps; returns once they are handed over.
  virtual void append(ByteView bytes) = 0;
  // The same for memory that the caller keeps, and does not change until sync() has returned or
  // the file is destroyed: under direct I/O it is written from where it lies, if its address, its
  // size and the file's size so far are multiples of BufferPool::kAlignment. Copied otherwise.
  virtual void append_kept(ByteView bytes) { append(bytes); }
  // Returns when every appended byte and the file's length are durable. Never tried again after a
  // failure: the file is then worthless (a second fsync may succeed over lost data).
  virtual void sync(Deadline deadline) = 0;
  virtual void close() = 0;
  virtual uint64_t size() const = 0;  // bytes appended so far
  virtual const std::string& name() const = 0;
};

class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  virtual uint64_t size() const = 0;
  virtual const std::string& name() const = 0;
};

// One byte range to read. A range that reaches beyond the file's end is Error(kCorrupt): somebody
// promised bytes that are not there.
struct ReadOp {
  const ReadableFile* file = nullptr;
  uint64_t offset = 0;
  uint64_t size = 0;            // bytes
  std::byte* target = nullptr;  // where the bytes go, `size` bytes, any alignment; or null: into
                                // pooled memory (size <= the pool's buffer_bytes; direct I/O
                                // wants 2 * BufferPool::kAlignment less, or an aligned offset)
  uint32_t* crc32 = nullptr;    // where the CRC-32 of the bytes goes before `done`, if wanted:
                                // taken piece by piece as they come, while they are in cache
};

// What becomes of the bytes that a read brings from the disk.
enum class CachePolicy : uint8_t {
  kBypass,  // large ranges pass the page cache where that is as fast: nobody else loses memory
  kKeep,    // they stay in the page cache, so that reading them again costs no disk
};

struct ReadOptions {
  // Threads that read and call done (null: the calling thread alone).
  ThreadPool* threads = nullptr;
  // Where ops without a target land, and what direct I/O bounces unaligned ranges through.
  std::shared_ptr<BufferPool> buffers;
  Deadline deadline = Deadline::never();
  // A storage without a cache ignores it; a range that is in the cache is read from there anyway.
  CachePolicy cache = CachePolicy::kBypass;
};

// Called once for each op, in no particular order and from several threads at once, with the
// op's index and its bytes (at its target, or in pooled memory that is reused after the call).
using ReadDone = std::function<void(size_t index, ByteView bytes)>;

// A lock on a name that goes when the object or the process does; a forked child has no part in it.
class StorageLock {
 public:
  virtual ~StorageLock() = default;
};

struct FileInfo {
  uint64_t size = 0;
  bool regular = true;  // false: a directory, FIFO, device, socket
};

class Storage;

// Where something stands: under a name of a storage.
struct StoragePlace {
  std::shared_ptr<Storage> storage;
  std::string name;
};

// Storages are owned by shared pointers: children, and what parent() and held() return, keep alive
// what they need of the storage they came from.
class Storage : public std::enable_shared_from_this<Storage> {
 public:
  virtual ~Storage() = default;

  // Where only a trial can answer (kExchange), the first question tries, with a directory of its
  // own in the root (".tilestone-probe-..."), which goes again, and the answer is kept. False where
  // the trial fails for another reason; the next question then tries again.
  virtual bool can(StorageCapability what) = 0;
  virtual ReadCosts read_costs() const { return {}; }
  // How a person would name the root: a path or URL.
  virtual std::string describe() const = 0;

  // A new, empty file; kAlreadyExists where the name is taken. Parent directories must exist.
  // expected_size (bytes, 0: unknown) lets the storage choose how to write and reserve room.
  virtual std::unique_ptr<WritableFile> create(const std::string& name,
                                               uint64_t expected_size = 0) = 0;
  virtual std::unique_ptr<ReadableFile> open(const std::string& name) = 0;
  // Runs all ops, many at a time, merged with nothing: the caller has planned them. The first
  // failure (also one thrown by done) ends the batch and is rethrown once nothing is under way.
  virtual void read(std::span<const ReadOp> ops, const ReadOptions& options,
                    const ReadDone& done) = 0;

  // Brings the ops' ranges into memory that all processes of the host share, as far as they are
  // not there; targets are ignored, every op must fit a pooled buffer. Returns the bytes of the
  // ops that were not there as a whole. Errors as read's. Does nothing without kSharedCache.
  virtual uint64_t prefetch(std::span<const ReadOp> ops, const ReadOptions& options);

  virtual std::optional<FileInfo> stat(const std::string& name) = 0;  // nullopt: not there
  // Files (not directories) whose name starts with prefix, whole subtree, sorted.
  virtual std::vector<std::string> list(const std::string& prefix = "") = 0;
  // Those of list(prefix) that have no '/' behind the prefix. By default all are listed; a storage
  // with directories looks into one of them only.
  virtual std::vector<std::string> list_files(const std::string& prefix = "");
  // Directories whose name starts with prefix and has no '/' behind it, sorted: with "a/.b" those
  // that stand directly in "a". Nothing below them is looked at. Links are no directories.
  virtual std::vector<std::string> list_directories(const std::string& prefix = "") = 0;
  // Atomic. replace == false: kAlreadyExists when `to` exists, and nothing is changed.
  virtual void rename(const std::string& from, const std::string& to, bool replace) = 0;
  // Publishes `bytes` under `name` in one step, durably: after a crash at any point `name` holds
  // its old content (or is absent) or `bytes`, whole. replace == false: kAlreadyExists when `name`
  // exists. By default written to temp_name, synced, renamed, directory synced; where a storage has
  // a way of its own, it needs no temp_name. On failure the temporary file is removed where that
  // still works.
  virtual void publish(const std::string& name, const std::string& temp_name, ByteView bytes,
                       bool replace, Deadline deadline);
  virtual void remove(const std::string& name) = 0;  // kNotFound when not there
  // The directory `name` ("": the root) and its parents; no error when it exists, whoever made it.
  // The root, and what leads to it, is durable when the call returns.
  virtual void make_directory(const std::string& name) = 0;
  virtual void remove_directory(const std::string& name) = 0;  // an empty one
  // Swaps two directories, neither within the other, in one step: after a crash both names stand
  // for what they stood for before the call, or both for what they stand for after it. Durable
  // when the call returns. Error(kUnsupported) where the file system can't (see kExchange), or
  // can't with these two (a mount point): nothing is changed then. A link is Error(kUnsafe).
  virtual void exchange_directories(const std::string& a, const std::string& b) = 0;
  // Renames the directory `from` to `to`, in one step and durably as above. kAlreadyExists where
  // `to` is there and not an empty directory.
  virtual void rename_directory(const std::string& from, const std::string& to) = 0;
  // Returns when the entries of the directory ("": the root) are durable: names created, renamed
  // and removed before the call.
  virtual void sync_directory(const std::string& name) = 0;

  // The lock, or null when somebody else holds it. Makes the file `name`, which stays.
  // Error(kUnsupported) where nothing can be locked, which is found out by trying: a save then
  // removes no leftovers, which may be another save's files, and says so in the log; gc refuses.
  virtual std::unique_ptr<StorageLock> try_lock(const std::string& name) = 0;
  // Whether somebody holds it, who may be the caller. Takes, makes and changes nothing, so that
  // nobody's try_lock fails for it, and a storage that can only be read will do. kUnsupported
  // likewise, where there is such a file.
  virtual bool is_locked(const std::string& name) = 0;

  // Removes the directory `name` with all that is in it, links but not what they lead to. Names
  // that others remove meanwhile are no failure; what can't be removed is an Error that names it,
  // and what has not been removed by then stays. Durable from sync_directory on, like remove.
  void remove_tree(const std::string& name);

  // The directory `name` as a storage of its own, which has this one's options and faults. It need
  // not be there yet: make_directory("") of the child makes it.
  virtual std::shared_ptr<Storage> child(const std::string& name);
  // The storage in which this root is a directory, and its name there, one component: where
  // siblings of the root can be made. Links are resolved, so that the name is the directory's own.
  // nullopt where there is none (the topmost directory), or where that can't be known.
  virtual std::optional<StoragePlace> parent() { return std::nullopt; }
  // A storage that stays with the directory that is the root now, wherever that is renamed or
  // exchanged to; kNotFound where there is none. This storage where roots can't be held so.
  virtual std::shared_ptr<Storage> held() { return shared_from_this(); }
};

// Reads a whole file; kCorrupt when it is larger than max_size bytes.
Bytes read_file(Storage& storage, const std::string& name, uint64_t max_size);

}  // namespace tilestone
