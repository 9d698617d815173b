// Storage: named files under one root. It knows names and byte ranges, but nothing about tensors.
//
// Names are relative paths with '/' between components ("__0_0.distcp", "sub/a"). A name is refused
// with Error(kUnsafe) if it is empty, is absolute, contains NUL or a "." or ".." component, or
// leaves the root through a symbolic link. Opening anything that is not a regular file is refused
// in the same way.
// Every failure is an Error with the file's name, the system's errno and a message that names the
// operation. The code is kNotFound or kAlreadyExists if that is the cause, and kIo otherwise.
//
// All calls are thread-safe, but only one thread at a time may use a WritableFile.
#pragma once

#include <chrono>
#include <compare>
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
#include "tilestone/base/cache_policy.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/file_name.h"
#include "tilestone/storage/condition.h"

namespace tilestone {

class Directories;
class ThreadPool;

// The overhead of reading, in bytes that could be read in the same time. The read planner uses
// these costs. The defaults suit disks and file servers.
struct ReadCosts {
  uint64_t gap_bytes = 3072;           // two ranges of a file at most this far apart are merged
  uint64_t request_bytes = 64u << 10;  // one more range
  uint64_t open_bytes = 128u << 10;    // one more file: the lookup and the open
};

// What is known of a storage without a trial.
struct StorageFacts {
  std::string description;  // the root as shown to a person: a path or a URL
  // What only file systems can do, and only the commit of files with fixed names needs
  // (engine/commit/sibling.cc). The storage owns it. Null: not here.
  Directories* directories = nullptr;
  // Directories are there by themselves: one without files is listed, no file can have its name,
  // and a whole one can take another's place. Elsewhere they are only the beginnings of names.
  bool has_folders = false;
  // A file can get another name. So a put() gives its scratch file the name: nothing else of that
  // is left, and the put fails if somebody has removed it. Elsewhere a put does not touch it.
  bool renames = false;
  // Each call is a request to a server, and a listing is one that says all sizes. So many files are
  // looked for by a listing, or asked for side by side.
  bool costs_requests = false;
  ReadCosts read_costs = {};
  // Reads and writes can go through the page cache of this process's host. Used by load: without
  // it, ranks on one host exchange messages instead.
  bool page_cache = false;
  // After one process has prefetched data, other processes on its host read that data from memory.
  bool shared_cache = false;
  // The conditions that a put() can have here. Of an object store they are assumed to be there
  // until a put has shown the reverse: the first one with a condition in a process finds out.
  bool put_if_absent = true;
  bool put_if_tag = false;
  // Not 0: a claim is a lease, which its holder renews after each period: it costs requests while
  // it is held, and that of a process that has died goes only after a while (lease.h). So few
  // processes should hold one.
  std::chrono::duration<double> lease_period{0};
  bool claims_are_leases() const { return lease_period.count() > 0; }
  // The most bytes of a file's name, such that every program can open the file by its whole path.
  uint64_t max_name_bytes = UINT64_MAX;
};

// A new file: bytes are appended, then made durable once. If it is destroyed without close(), the
// bytes written so far remain, but their number and their durability are unspecified.
class WritableFile {
 public:
  virtual ~WritableFile() = default;

  // Appends the buffer's view() and takes the buffer. May return before the bytes are written, so
  // that several writes are in progress at once. May throw the failure of an earlier append. Each
  // buffer returns to its pool as soon as it is written, whatever the caller does meanwhile.
  // Under direct I/O the size of every append but the last should be a multiple of
  // BufferPool::kAlignment. All bytes after an append of another size go through the page cache.
  virtual void append(Buffer buffer) = 0;
  // Appends a few bytes. The caller may reuse `bytes` when the call returns.
  virtual void append(ByteView bytes) = 0;
  // Appends memory that the caller must keep unchanged until sync() has returned or the file is
  // destroyed. Under direct I/O the bytes are written without a copy if their address, their size
  // and the file's size so far are multiples of BufferPool::kAlignment. Otherwise they are copied.
  // crc32: of the bytes, if it is known. An object store sends one for each 8 MiB of the file, and
  // computes it again if an append goes beyond a multiple of these.
  virtual void append_kept(ByteView bytes, std::optional<uint32_t> /*crc32*/ = std::nullopt) {
    append(bytes);
  }
  // Returns when every appended byte and the file's length are durable. In an object store the file
  // exists from now on, and what append() refuses elsewhere is refused here: kAlreadyExists. Must
  // not be called again after a failure: the file is then worthless (a second fsync may succeed
  // over lost data).
  virtual void sync(Deadline deadline) = 0;
  virtual void close() = 0;           // without sync(): the file exists, perhaps not durably
  virtual uint64_t size() const = 0;  // bytes appended so far
  virtual const std::string& name() const = 0;
};

class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  virtual uint64_t size() const = 0;
  virtual const std::string& name() const = 0;
};

// One byte range to read. A range that extends beyond the end of the file is Error(kCorrupt): some
// other file describes bytes that do not exist.
struct ReadOp {
  const ReadableFile* file = nullptr;
  uint64_t offset = 0;
  uint64_t size = 0;            // bytes
  std::byte* target = nullptr;  // where the bytes go: `size` bytes of any alignment. Null: into a
                                // pooled buffer; `size` must not exceed the pool's buffer_bytes
                                // (for direct I/O at an unaligned offset, buffer_bytes less
                                // 2 * BufferPool::kAlignment)
  // If not null, set before `done` is called: the CRC-32 of every crc_bytes bytes of the op (the
  // last ones may be fewer), or with crc_bytes == 0 that of all of them. Computed as the bytes
  // arrive, while they are in cache.
  uint32_t* crc32 = nullptr;
  uint64_t crc_bytes = 0;
};

struct ReadOptions {
  // Threads that read and call `done`. Null: only the calling thread.
  ThreadPool* threads = nullptr;
  // Receives ops without a target. Direct I/O reads unaligned ranges through these buffers too.
  std::shared_ptr<BufferPool> buffers;
  Deadline deadline = Deadline::never();
  // A storage without a cache ignores this. A range that is already cached is always read from the
  // cache.
  CachePolicy cache = CachePolicy::kBypass;
  // If not null, the ranges are only brought into the shared cache (StorageFacts::shared_cache),
  // unless they are there. Targets are ignored, `done` is not called, and every op must fit a
  // pooled buffer. The total size, in bytes, of the ops that were not completely there is added.
  uint64_t* prefetched = nullptr;
};

// Called once for each op with the op's index and its bytes. The bytes are at the op's target, or
// in a pooled buffer that is reused after the call. Several threads may call it at once, in any
// order.
using ReadDone = std::function<void(size_t index, ByteView bytes)>;

// A claim on a name: a lock, or a lease. It is released when the object is destroyed or the process
// ends; a lease then some time after that, or while its holder can't reach the store. A forked
// child does not share it.
class StorageClaim {
 public:
  virtual ~StorageClaim() = default;
  // Nobody else can have the claim until then. Expired: the holder has lost it, or could not find
  // out before the deadline, and must not change what others may change under the claim.
  virtual Deadline held_until(const Deadline&) { return Deadline::never(); }
};

// Two names of one file have the same.
struct FileIdentity {
  uint64_t device = 0;
  uint64_t number = 0;
  friend auto operator<=>(const FileIdentity&, const FileIdentity&) = default;
};

struct FileInfo {
  uint64_t size = 0;
  bool regular = true;  // false: a directory, FIFO, device, socket
  // When its content last changed, in seconds since 1970; nullopt: not known.
  std::optional<double> modified = std::nullopt;
  // Of its content, for Condition::has(). Other content has another tag, equal content may have the
  // same. "": not where put_if_tag is false.
  std::string tag = "";
  // How long its content has not changed, at least: in seconds, by the store's own clock. nullopt:
  // not known. Only stat() says it, and only where claims are leases.
  std::optional<double> least_age = std::nullopt;
  // Only stat() says it, of a file that has several names.
  std::optional<FileIdentity> identity = std::nullopt;
};

// The names that start with a prefix, sorted.
struct Listing {
  std::vector<std::string> files = {};
  // Of the files, in their order and without tags. Empty where a list of names says no more.
  std::vector<FileInfo> infos = {};
  // Directories, without a slash at the end. Links are not listed.
  std::vector<std::string> directories = {};
  bool is_whole = false;  // of Depth::kAtOnce: one request has listed it all
};

enum class Depth : uint8_t {
  kTree,    // all files of the whole tree, and no directories
  kLevel,   // files and directories that have no '/' after the prefix: "a/.b" finds those directly
            // in "a". Only this directory is read.
  kAtOnce,  // kTree, as of one instant, where one request lists that: of an object store with few
            // files there. Otherwise nothing.
  kUnfinished,  // files that were begun, and neither finished nor given up: some object stores keep
                // what was written, though no other listing shows it
};

// Which files a removal removes.
struct FileRemoval {
  // Given, for one name: the file goes if it still has this tag. Where put_if_tag is false, nothing
  // is asked: the caller has a claim. Many object stores ignore the condition of a removal: there,
  // a file that is put between a look and the removal goes, too.
  std::optional<std::string> if_tag = std::nullopt;
  // Nobody else can have put the file before the request is executed, so the tag need not be asked
  // for first.
  bool is_alone = false;
  bool unfinished = false;  // not the files, but those of Depth::kUnfinished under these names
  std::optional<Deadline> deadline = std::nullopt;  // nullopt: as of a call that takes none
};

class Storage;

// A file or directory: a storage and a name in it.
struct StorageEntry {
  std::shared_ptr<Storage> storage;
  std::string name;
};

// A storage must be owned by a shared_ptr. The storages that child(), parent() and held() return
// keep alive what they need of the storage that made them.
class Storage : public std::enable_shared_from_this<Storage> {
 public:
  virtual ~Storage() = default;

  virtual StorageFacts facts() const = 0;

  // Creates an empty file; kAlreadyExists if the name exists. Directories of the name that do not
  // exist are made; the root and the directories above it are durable when the call returns. A root
  // that was there before and has gone is kNotFound.
  // expected_size (in bytes, 0: unknown) lets the storage choose how to write and reserve space.
  // An object store makes the file in sync(), and its appends end with the deadline, too.
  virtual std::unique_ptr<WritableFile> create(const std::string& name, uint64_t expected_size = 0,
                                               const Deadline& deadline = Deadline::never()) = 0;
  virtual std::unique_ptr<ReadableFile> open(const std::string& name) = 0;
  // Runs all ops, many at a time. It never merges ops: the caller has planned them. The first
  // failure, including one that `done` throws, ends the batch. It is rethrown when no read is in
  // progress any more. kNotFound for a file of an object store that was replaced or removed since
  // it was opened.
  virtual void read(std::span<const ReadOp> ops, const ReadOptions& options,
                    const ReadDone& done) = 0;

  virtual std::optional<FileInfo> stat(const std::string& name) = 0;  // nullopt: does not exist
  virtual Listing listing(const std::string& prefix, Depth depth) = 0;
  // Puts a small file in one step, durably: after a crash at any point `name` has its complete old
  // content (or is absent), or exactly `bytes`. False, with nothing changed, if the condition does
  // not hold. Any other failure may have put the file, or may still put it. Those who compete for a
  // name must put different bytes, because after a lost answer an object store recognises its own
  // put by its bytes. Error(kUnsupported) for a condition that is not one of the facts().
  // `scratch`: a name that nobody else uses, for a storage that writes a file before it gives it
  // its name; a crash may leave it. The default renames, and so needs directories.
  bool put(const std::string& name, ByteView bytes, const Condition& condition,
           const std::string& scratch, Deadline deadline) {
    return put_for_tag(name, bytes, condition, scratch, deadline).has_value();
  }
  // put(), and the tag that the file has got; "" if the storage does not say it. nullopt: the
  // condition does not hold.
  virtual std::optional<std::string> put_for_tag(const std::string& name, ByteView bytes,
                                                 const Condition& condition,
                                                 const std::string& scratch, Deadline deadline);
  // Removes files. One that does not exist is no failure. All are tried; then the first failure is
  // thrown, as for an object that is locked. False: the file has another tag, and stays.
  virtual bool remove_files(std::span<const std::string> names, const FileRemoval& how) = 0;
  // Makes the new file `name` with the content of another file, without passing the bytes: in a
  // file system a further name of that file, in an object store a copy that the server makes. Of a
  // file that nobody changes. False, and nothing is made: that is not possible here (another file
  // system or store, no permission, too many names), which is logged once; or the other file does
  // not exist. kAlreadyExists if `name` exists, elsewhere than in an object store.
  virtual bool link(const StorageEntry& from, const std::string& name, const Deadline& deadline);
  // Claims the name; null if somebody else has the claim. Creates the file `name`, and its
  // directories, the root always. Who has the claim may remove the file: the claim of a file
  // without a name is never given. Where claims are leases, the file is there while somebody has
  // the claim, and a process that has died may seem to have it: the call waits, until `patience`,
  // for what shows that it lives or has lost its claim: less than a minute. Error(kUnsupported) if
  // names can't be claimed here, which only trying can tell. In that case a save removes no
  // leftovers, because they may belong to a running save, and logs this; gc refuses to run. The
  // file may say, for people, who has the claim: "process 1 on node7 since DATE".
  virtual std::unique_ptr<StorageClaim> claim(const std::string& name,
                                              const Deadline& patience = Deadline::never()) = 0;
  // Whether anybody, including the caller, has the claim. It takes no claim and changes nothing, so
  // it never makes claim() fail and it works on read-only storage. Error(kUnsupported) if the file
  // exists but names can't be claimed here.
  virtual bool is_claimed(const std::string& name) = 0;

  // A part of this storage ("": all), with its options: child() and until().
  virtual std::shared_ptr<Storage> view(const std::string& directory,
                                        const std::optional<Deadline>& deadline);

  // The rest are short forms of the calls above.

  std::string describe() const { return facts().description; }
  Directories* directories() const { return facts().directories; }
  // The directory `name` as a storage of its own. It need not exist yet, and is found anew by each
  // call. Error(kUnsupported) where it can't be.
  std::shared_ptr<Storage> child(const std::string& name);
  // This storage for the calls of one save or load. Where a server may not answer, a call that
  // takes no deadline ends with this one, but has a few seconds at least, so that what has failed
  // can be cleaned. Without one it has a minute.
  std::shared_ptr<Storage> until(const Deadline& deadline) { return view("", deadline); }
  // The memory in bytes that this process's host, or its container, can still give to the page
  // cache. 0 for a storage without one.
  uint64_t available_cache() const;
  // A read with ReadOptions::prefetched, which it returns. Does nothing without a shared cache.
  uint64_t prefetch(std::span<const ReadOp> ops, ReadOptions options);
  std::vector<std::string> list(const std::string& prefix = "") {
    return listing(prefix, Depth::kTree).files;
  }
  std::vector<std::string> list_files(const std::string& prefix = "") {
    return listing(prefix, Depth::kLevel).files;
  }
  std::vector<std::string> list_directories(const std::string& prefix = "") {
    return listing(prefix, Depth::kLevel).directories;
  }
  // put(), with Error(kAlreadyExists) if `replace` is false and `name` exists.
  void publish(const std::string& name, const std::string& temp_name, ByteView bytes, bool replace,
               Deadline deadline);
  // Makes a small file, durably but for its name. If that fails, the file may be there: the caller
  // knows whether it may be removed.
  void make_file(const std::string& name, ByteView bytes, Deadline deadline);
  // The two halves of a put(), for a caller who must know which of them has failed. The first
  // writes and syncs the scratch file; if it fails, nothing is put, and the file is removed if
  // possible. The second puts the same bytes; unless it returns true, the scratch file stays, or it
  // has its new name. Without directories it always stays, and the caller removes it.
  void prepare_put(const std::string& scratch, ByteView bytes, Deadline deadline);
  bool put_prepared(const std::string& name, ByteView bytes, const Condition& condition,
                    const std::string& scratch, Deadline deadline);
  // put() of a message of processes that are at work, if absent: it is whole, but need not outlive
  // a crash of its host. `begun`: the scratch file, if the caller has made it before; else null.
  bool put_message(const std::string& name, ByteView bytes, const std::string& scratch,
                   std::unique_ptr<WritableFile> begun, Deadline deadline);
  // Gives a file another name, as Directories::rename_file(). Error(kUnsupported) where
  // StorageFacts::renames is false.
  void rename(const std::string& from, const std::string& to, bool replace);
  // As in Directories. Without directories: names are durable.
  void settle(const std::string& name);
  void remove(std::span<const std::string> names) { remove_files(names, {}); }
  void remove(const std::string& name) { remove(std::span(&name, 1)); }
  // An absent file counts as removed.
  bool remove_if(const std::string& name, const std::string& tag, const Deadline& deadline,
                 bool is_alone = false) {
    return remove_files({&name, 1}, {.if_tag = tag, .is_alone = is_alone, .deadline = deadline});
  }
  // Discards the unfinished files whose names have this prefix and for which `goes` returns true.
  void discard_unfinished(const std::string& prefix,
                          const std::function<bool(const std::string& name)>& goes);
  // Removes the directory `name` and everything in it; links are removed, not followed. A name that
  // somebody else removes meanwhile is not a failure. A name that can't be removed ends the call
  // with an Error. Like remove, it is durable only after settle().
  void remove_tree(const std::string& name);
  // Removes the directory `name`, and those in it, as far as no file is in them. Nothing elsewhere
  // than in a file system, where there are no directories. Failures are logged.
  void tidy(const std::string& name) noexcept;
  // Makes the root, durably, also one that was there before and has gone. Nothing where there are
  // no directories.
  void make_root();
  // As in Directories. Nothing where there are none.
  void copy_permissions(const std::string& name, const std::string& like);
  // As in Directories. Without directories: nullopt, this storage, true.
  std::optional<StorageEntry> parent();
  std::shared_ptr<Storage> held();
  bool stands();
};

// Reads a whole file; kCorrupt if it is larger than max_size bytes.
Bytes read_file(Storage& storage, const std::string& name, uint64_t max_size);

}  // namespace tilestone
