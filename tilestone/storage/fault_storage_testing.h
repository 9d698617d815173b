// Simulates a machine whose disk misbehaves as a test requests. Any call can fail, wait, do half
// of its work or report success for nothing. A process or the whole machine can die at any call.
// After a power loss, only synced data is certain to exist.
//
//   auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
//     return call.index == k ? FaultAction::crash() : FaultAction::pass();
//   });
//   try { save(..., disk->storage()); } catch (const Error&) {}
//   auto after = memory_storage(disk->surviving_image(Survival::kNothingUnsynced, seed));
//
// The model of a power loss is pessimistic. A file's bytes are durable after the file's sync. A
// created, renamed or removed name is durable after the sync of its directory; the sync of the file
// does not make its name durable. Over memory_objects() what is there is durable. A rename and an
// exchange of directories are atomic: a crash never leaves half of one. An operation of several
// steps (exchange and sync, remove a tree) counts as several calls here.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone {

enum class StorageOp : uint8_t {
  kCreate,
  kAppend,
  kSync,
  kClose,
  kOpen,
  kRead,  // one call for each op of a batch; all of them come before any byte is read
  kStat,
  kList,
  kRename,
  kLink,
  kPut,  // of an object store; elsewhere a put is a create, an append, a rename, ...
  kRemove,
  kMakeDirectory,
  kRemoveDirectory,
  kRenameDirectory,
  kExchangeDirectories,
  kSettle,
  kLock,
};
std::string_view to_string(StorageOp op);  // "create", ...
// Whether a call of this kind can change the disk.
bool changes_storage(StorageOp op);
// Whether FaultAction::fail_late can execute it late.
bool comes_late(StorageOp op);

// A call that is about to be made.
struct StorageCall {
  uint64_t index = 0;  // the number of calls to the disk before this one
  int client = 0;      // the client whose storage() was called
  StorageOp op = StorageOp::kStat;
  std::string_view name;  // the file or directory; for a rename, the old name
  std::string_view to;  // for a rename or link, the new name; for an exchange, the other directory
  uint64_t offset = 0;  // for an append or a read, in bytes
  uint64_t size = 0;    // for an append or a read, in bytes
};

struct FaultAction {
  enum class Kind : uint8_t { kDo, kTear, kDrop, kTwice, kLate };
  enum class Then : uint8_t { kGoOn, kFail, kDie, kCrash };

  // How much the call does: all, the first `keep` bytes, nothing, all of it twice, all of it later.
  Kind kind = Kind::kDo;
  Then then = Then::kGoOn;            // how the call ends
  int error = 0;                      // the errno of kFail
  uint64_t keep = 0;                  // the bytes of an append that kTear writes
  std::chrono::nanoseconds delay{0};  // the wait before the call
  uint64_t later = 0;                 // of kLate: how many calls to the disk come before

  static FaultAction pass() { return {}; }
  static FaultAction wait(std::chrono::nanoseconds time) { return {.delay = time}; }
  // Fails with the errno, instead of doing the work or after it. ENOTSUP gives kUnsupported, ENOENT
  // kNotFound, any other errno kIo.
  static FaultAction fail(int error) { return {Kind::kDrop, Then::kFail, error}; }
  static FaultAction fail_after(int error) { return {Kind::kDo, Then::kFail, error}; }
  // Fails with the errno, and is executed all the same, before the `later`-th call to the disk
  // after this one: its request was on its way. Only renames, puts, exchanges and removals come
  // late; another call does nothing.
  static FaultAction fail_late(int error, uint64_t later) {
    return {Kind::kLate, Then::kFail, error, 0, {}, later};
  }
  // The request is executed twice, and the second answer is reported. An append is executed once.
  static FaultAction repeat() { return {Kind::kTwice}; }
  // Appends the first `keep` bytes, then fails. A call other than an append does nothing.
  static FaultAction tear(uint64_t keep, int error) {
    return {Kind::kTear, Then::kFail, error, keep};
  }
  // Reports success without doing the work. A dropped append writes zeros; a dropped create returns
  // a file that has no name. Calls that change nothing (open, read, stat, list) and locks are
  // executed normally.
  static FaultAction drop() { return {Kind::kDrop, Then::kGoOn}; }
  // The machine dies before, after or in the middle of the call. This call and every later call of
  // every client throw the same error.
  static FaultAction crash() { return {Kind::kDrop, Then::kCrash}; }
  static FaultAction crash_after() { return {Kind::kDo, Then::kCrash}; }
  static FaultAction crash_torn(uint64_t keep) { return {Kind::kTear, Then::kCrash, 0, keep}; }
  // Only this client dies. Everything that it did stays, synced or not. Its locks are released.
  static FaultAction die() { return {Kind::kDrop, Then::kDie}; }
  static FaultAction die_after() { return {Kind::kDo, Then::kDie}; }
};

// Called before each call, on the thread that makes the call.
using FaultHook = std::function<FaultAction(const StorageCall&)>;

// What part of the unsynced work survives a power loss. Synced work always survives.
enum class Survival : uint8_t {
  kAll,                // everything, as after a process was killed
  kNoUnsyncedData,     // all names; no unsynced bytes: files end where they were synced
  kZeroedData,         // all names; unsynced bytes are zeros
  kTorn512,            // all names; the first few unsynced 512-byte sectors of each file, the rest
                       // is cut off or zeros
  kTorn4096,           // the same with 4 KiB blocks
  kNoUnsyncedEntries,  // all bytes; no unsynced change of a name
  kNothingUnsynced,    // no unsynced bytes and no unsynced change of a name
  kRandom,             // a random subset of the name changes and of the unsynced 512-byte sectors
};
inline constexpr Survival kAllSurvivals[] = {Survival::kAll,
                                             Survival::kNoUnsyncedData,
                                             Survival::kZeroedData,
                                             Survival::kTorn512,
                                             Survival::kTorn4096,
                                             Survival::kNoUnsyncedEntries,
                                             Survival::kNothingUnsynced,
                                             Survival::kRandom};
std::string_view to_string(Survival survival);  // "all", "no_unsynced_data", ...

class FaultJournal;

// Thread-safe.
class FaultDisk : public std::enable_shared_from_this<FaultDisk> {
 public:
  // Wraps any storage. surviving_image works only if `inner` is a storage in memory that nobody
  // else writes to. The present content of `inner` counts as durable.
  static std::shared_ptr<FaultDisk> create(std::shared_ptr<Storage> inner, FaultHook hook = {});
  ~FaultDisk();

  // The disk for one process (rank).
  std::shared_ptr<Storage> storage(int client = 0);

  // From now on directories can't be exchanged: kUnsupported.
  void take_away_exchange();

  // From now on listings lag: they show the names of this earlier image, of files that were removed
  // since then too, and none that is newer.
  void lag_listings(FileImage earlier);

  // Executes what is still to be executed late.
  void execute_late();

  uint64_t calls() const;  // number of calls so far
  bool crashed() const;    // whether the machine has died
  // The files after a power loss now. Depends only on the calls so far and, where the policy leaves
  // a choice, on the seed. Error(kInvalidArgument) if `inner` is not in memory.
  FileImage surviving_image(Survival survival, uint64_t seed = 0) const;

 private:
  friend class FaultStorage;
  friend class FaultDirectories;
  friend class FaultWritable;
  struct State;
  FaultDisk(std::shared_ptr<Storage> inner, FaultHook hook);
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
