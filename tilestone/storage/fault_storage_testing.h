// A machine whose disk misbehaves as a test wants it: any call can fail, wait, do half its work or
// pretend; a process or the whole machine can die at any call; and after a power loss only what
// was synced is sure to be there.
//
//   auto disk = FaultDisk::create(memory_storage(image), [&](const StorageCall& call) {
//     return call.index == k ? FaultAction::crash() : FaultAction::pass();
//   });
//   try { save(..., disk->storage()); } catch (const Error&) {}
//   auto after = memory_storage(disk->surviving_image(Survival::kNothingUnsynced, seed));
//
// What a power loss leaves is pessimistic: the bytes of a file are sure from the file's sync on, a
// name that was created, renamed or removed from the sync of its directory on; a file's sync says
// nothing of its name. A rename is atomic, and so is an exchange of directories: never half of it.
// What a storage does in steps (exchanging and syncing, removing a tree) is as many calls here.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "tilestone/storage/memory_storage.h"

namespace tilestone {

enum class StorageOp : uint8_t {
  kCreate,
  kAppend,
  kSync,
  kClose,
  kOpen,
  kRead,  // one for each op of a batch, all before any byte is read
  kStat,
  kList,
  kRename,
  kRemove,
  kMakeDirectory,
  kRemoveDirectory,
  kRenameDirectory,
  kExchangeDirectories,
  kSyncDirectory,
  kLock,
};
std::string_view to_string(StorageOp op);  // "create", ...
// Whether a call of this kind can change what is on the disk.
bool changes_storage(StorageOp op);

// A call that is about to be made.
struct StorageCall {
  uint64_t index = 0;  // counts all calls of the disk, from 0
  int client = 0;      // whose storage() it came through
  StorageOp op = StorageOp::kStat;
  std::string_view name;  // the file's or directory's; of a rename, the old name
  std::string_view to;    // of a rename, the new name; of an exchange, the other
  uint64_t offset = 0;    // of an append or read, in bytes
  uint64_t size = 0;      // likewise
};

struct FaultAction {
  enum class Kind : uint8_t { kDo, kTear, kDrop };
  enum class Then : uint8_t { kGoOn, kFail, kDie, kCrash };

  Kind kind = Kind::kDo;    // what is done of the call: all, the first `keep` bytes, nothing
  Then then = Then::kGoOn;  // and what comes of it
  int error = 0;            // errno of kFail
  uint64_t keep = 0;        // bytes of an append that a torn call writes
  std::chrono::nanoseconds delay{0};  // before all that

  static FaultAction pass() { return {}; }
  static FaultAction wait(std::chrono::nanoseconds time) { return {.delay = time}; }
  // Fails with the errno, without or after doing the work; of ENOTSUP the code is kUnsupported.
  static FaultAction fail(int error) { return {Kind::kDrop, Then::kFail, error}; }
  static FaultAction fail_after(int error) { return {Kind::kDo, Then::kFail, error}; }
  // Appends the first `keep` bytes, then fails. Of any other call nothing is done.
  static FaultAction tear(uint64_t keep, int error) {
    return {Kind::kTear, Then::kFail, error, keep};
  }
  // Reports success for nothing: a dropped append leaves zeros, a dropped create a file that is
  // nowhere. Calls that only look (open, read, stat, list) and locks are done all the same.
  static FaultAction drop() { return {Kind::kDrop, Then::kGoOn}; }
  // The machine is dead, before, after or in the middle of the call: it and every later call, of
  // every client, throws the same error.
  static FaultAction crash() { return {Kind::kDrop, Then::kCrash}; }
  static FaultAction crash_after() { return {Kind::kDo, Then::kCrash}; }
  static FaultAction crash_torn(uint64_t keep) { return {Kind::kTear, Then::kCrash, 0, keep}; }
  // This client alone is dead; what it did stays, synced or not. Its locks go.
  static FaultAction die() { return {Kind::kDrop, Then::kDie}; }
  static FaultAction die_after() { return {Kind::kDo, Then::kDie}; }
};

// Asked before each call, from whatever thread makes it.
using FaultHook = std::function<FaultAction(const StorageCall&)>;

// What is left of unsynced work after a power loss. Synced work always is.
enum class Survival : uint8_t {
  kAll,                // everything, as after a mere kill
  kNoUnsyncedData,     // files end where they were synced; all names
  kZeroedData,         // unsynced bytes are zeros; all names
  kTorn512,            // of each file's unsynced bytes the first few 512-byte sectors, all names;
  kTorn4096,           // or 4 KiB blocks; the rest is cut off or zeros
  kNoUnsyncedEntries,  // all data, but names as they were synced
  kNothingUnsynced,    // neither
  kRandom,             // any subset of name changes, and of 512-byte sectors
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
  // Over any storage; surviving_image needs one of memory_storage(), which nobody else writes to
  // and whose content is durable now.
  static std::shared_ptr<FaultDisk> create(std::shared_ptr<Storage> inner, FaultHook hook = {});
  ~FaultDisk();

  // The disk as one process (rank) sees it.
  std::shared_ptr<Storage> storage(int client = 0);

  // From now on the disk can't do this: can() says so, and so does who tries.
  void take_away(StorageCapability what);

  uint64_t calls() const;  // made so far
  bool crashed() const;    // a crash has been taken
  // What the next machine finds, as a function of what was done so far and, where the policy
  // leaves a choice, the seed. Error(kInvalidArgument) over storage that is not memory.
  FileImage surviving_image(Survival survival, uint64_t seed = 0) const;

 private:
  friend class FaultStorage;
  friend class FaultWritable;
  struct State;
  FaultDisk(std::shared_ptr<Storage> inner, FaultHook hook);
  std::unique_ptr<State> state_;
};

}  // namespace tilestone
