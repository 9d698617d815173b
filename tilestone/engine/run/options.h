// Options of save, load and Checkpoint. Each has a default that is right for most, and a Python
// keyword of the same name. No environment variable changes what they mean. A number outside its
// limits is Error(kInvalidArgument) with the option's name, on every rank.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/interrupt.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/state_dict.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

// How far long work is. Called from one thread at a time, at most about ten times a second and
// once at the end. An exception that it throws, of any type, ends the work on this rank and comes
// out of the call as it is; the other ranks get Error(kInterrupted).
struct Progress {
  std::string_view phase;   // "write", "read", "verify"
  uint64_t bytes_done = 0;  // of this rank
  uint64_t bytes_total = 0;
  double seconds = 0;  // since the phase began
};
using ProgressFn = std::function<void(const Progress&)>;

inline constexpr double kDefaultTimeout = 1800;  // seconds, for the whole of a save or load
inline constexpr double kNoTimeout = std::numeric_limits<double>::infinity();
// One buffer of 64 KiB, twice: in two-phase reading messages have a half.
inline constexpr uint64_t kMinBufferBytes = 128u << 10;
inline constexpr uint64_t kMaxBufferBytes = uint64_t{1} << 44;
inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxFilesPerRank = 1024;
inline constexpr uint64_t kMaxAttributeBytes = 1u << 20;         // of all names and values together
inline constexpr uint64_t kMaxTensorAttributeBytes = 16u << 20;  // likewise, of one rank

// A save without a communicator: its ranks know of one another by files alone, which they leave at
// the location. `token` and `number` name the attempt.
struct ByFiles {
  int rank = 0;
  int world_size = 1;
  // Of one run of a job: the same text on all its ranks, another one for every start of the job.
  // The same token once more, for a rank that was started again, is the promise that it saves the
  // same state. At least 8 bytes, at most 256.
  std::string token = {};
  uint64_t number = 0;  // of the saves under this token to this location
  bool wait = true;     // until the checkpoint is published; else the last rank to write publishes
  // As torch does with use_collectives=False: each rank writes all that it holds, replicas too, and
  // publishes its own `__RANK.metadata` as soon as its data is durable. Once all ranks have (`wait`
  // waits for that, and SaveResult::published says it), the location holds a rank-local checkpoint,
  // which publish() turns into an ordinary one. Format torch_dist only.
  bool torch_rank_local = false;
};

// Equal on all ranks, else Error(kMismatch) that names the option: format, dialect, agreement,
// overwrite, attributes, validate_access, common_differs, replicate, tp_replica_names.
// The others are each rank's own.
struct SaveOptions {
  enum class Agreement {
    kExchange,  // local plans to the coordinator: right for every state
    kRule,      // each rank alone, where replicas are known from placements or declared
  };
  Communicator comm = {};                            // default: a group of one
  std::shared_ptr<const Format> format = nullptr;    // default: torch_dist
  std::shared_ptr<const Dialect> dialect = nullptr;  // default: PyTorch's
  Agreement agreement = Agreement::kExchange;
  // Then `comm` is a group of one, and ranks agree by rule: replicas whose holders are declared or
  // known from placements are written once, balanced; others by each rank that has a main one, and
  // they must be the same. Objects that are not wrapped must be on every rank. Nothing is replaced
  // (overwrite is Error(kInvalidArgument)); formats whose data files have fixed names (zarr), the
  // dialect megatron_shards, and validate_access are Error(kUnsupported).
  std::optional<ByFiles> by_files = std::nullopt;
  // A valid checkpoint that stands at the location is replaced (it stays valid until the new one
  // is durable); without this, saving there is Error(kAlreadyExists).
  bool overwrite = false;
  // Before anything is written: the main replicas of all ranks hold each tensor's elements once,
  // and grids of objects are complete (plan/access.h). Without it a save accepts any replicas that
  // hold the same, and an incomplete grid. By rule too this takes the ranks' plans to the
  // coordinator.
  bool validate_access = false;
  // What it means when ranks differ in what is the same on all, so that one rank's is saved: in
  // Megatron-Core's dialect the common state (compared by its hash; a dict's order is no
  // difference), in PyTorch's the objects that are not wrapped (not by rule: there kError is
  // Error(kUnsupported)). kWarn: rank 0 logs it. Paths or keys and ranks are named.
  enum class Differing : uint8_t { kIgnore, kWarn, kError };
  Differing common_differs = Differing::kWarn;
  double timeout = kDefaultTimeout;                   // seconds, more than 0; or kNoTimeout
  uint64_t buffer_bytes = BufferPool::kDefaultTotal;  // pooled memory of this rank, bytes
  int threads = 0;                                    // 0: as many as the machine has, at most 8
  int files_per_rank = 1;
  // kLocal: what this rank holds and another rank of its replicate_group writes is written to this
  // rank's own data file too, so that after a restart in the same layout it reads no other file for
  // it. Copies are known to the manifest alone: who reads the format's index sees none. Replicas
  // must hold the same elements, else the save fails with Error(kMismatch) naming the key. By rule
  // and by files only what has declared holders is copied. Objects are copied where they are the
  // same: those of all ranks whatever the group, sharded ones by exchange alone.
  // Error(kUnsupported) in formats whose chunks are files of their own.
  enum class Replicate : uint8_t { kNone, kLocal };
  Replicate replicate = Replicate::kNone;
  // With kLocal: ranks of this save, this one among them, each once, in any order; each rank gives
  // its own. Mostly the ranks of one model-parallel group: over data parallelism each rank would
  // copy all of what it shares, up to the whole model. Error(kInvalidArgument) otherwise.
  std::vector<int> replicate_group = {};
  // Of this rank's copies at most, bytes of elements and of objects' items. The smallest are
  // written first, each of which saves as many reads as a large one; of equal ones those of the
  // lower key, then box.
  uint64_t max_copy_bytes = std::numeric_limits<uint64_t>::max();
  // In Megatron-Core's dialects: a tensor KEY of which tensor-parallel ranks hold replicas, by the
  // second of three numbers of their replica ids, has the names KEY.__tp_replica_0, ..._1, ... in
  // the index too, one for each of these ranks. All are names of the same bytes, for a stock
  // Megatron-Core that asks for them; Tilestone knows KEY alone. Error(kUnsupported) in other
  // dialects, and in formats whose index is the files' names.
  bool tp_replica_names = false;
  // Texts that say something of the checkpoint ("iteration": "100"), kept in its manifest.
  std::map<std::string, std::string> attributes = {};
  // The same for tensors, by key: values of plain kinds (null, bool, int, float, string, bytes,
  // list, tuple, dict). Each rank gives them for tensors that it saves (Error(kInvalidArgument) for
  // another key), whether or not it is the one that writes; what several ranks say of a tensor is
  // put together, and Error(kMismatch) where two contradict one another.
  std::map<std::string, Attributes> tensor_attributes = {};
  ProgressFn progress = nullptr;
  // Another thread may request it: the save then ends soon, as after any failure, and throws the
  // request's reason here and Error(kInterrupted) on the other ranks. Once the checkpoint is being
  // published the request comes too late.
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};

struct SaveResult {
  std::string save_id;
  uint64_t bytes_written = 0;  // by this rank
  uint64_t items_written = 0;  // by this rank; copies are not counted
  uint64_t copies = 0;         // by this rank (SaveOptions::replicate)
  uint64_t copy_bytes = 0;     // of elements and objects' items; bytes_written has them too
  // The ranks' common states were compared, and are not the same (SaveOptions::common_differs).
  bool common_differs = false;
  bool published = true;  // false: by files, without waiting, and other ranks are still writing
};

// What SaveOptions::replicate would write beside what a save without it writes.
struct CopyCost {
  uint64_t copies = 0;
  uint64_t bytes = 0;  // of elements, and of objects' items
  friend bool operator==(const CopyCost&, const CopyCost&) = default;
};

// Equal on all ranks, else Error(kMismatch) that names the option: format, two_phase,
// verify_checksums (ranks read for one another), not_in_checkpoint, not_requested, other_shape,
// sharded_only, validate_access, objects_by_grid. The others are each rank's own.
struct LoadOptions {
  // Two-phase reading: what several ranks want, and what would take a rank many short reads, is
  // read once by one rank for all.
  enum class TwoPhase {
    kAuto,    // on one host by way of its page cache, on several hosts by messages
    kAlways,  // by messages, in every group of more than one rank
    kNever,   // each rank reads for itself
  };
  Communicator comm = {};
  // Without a communicator: the number of this process among those of its job. Where the checkpoint
  // is one of torch's rank-local ones, this rank's own metadata alone is read if all that is wanted
  // stands there, and as the rank itself wrote it; everybody's otherwise. Of no effect on other
  // checkpoints, on loads of everything, and where differences between `wanted` and the checkpoint
  // are not errors.
  std::optional<int> own_rank = std::nullopt;
  std::shared_ptr<const Format> format = nullptr;  // default: found from the files
  bool cast = false;                               // convert from the stored dtype
  // Of every item that a rank reads whole; in two-phase reading by messages also of those that
  // several ranks together read whole.
  bool verify_checksums = true;
  TwoPhase two_phase = TwoPhase::kAuto;
  // What is left in the page cache. (Ranks of one host that read for one another by way of it leave
  // what they read there, whatever this says.)
  CachePolicy cache = CachePolicy::kBypass;
  // Paths below which everything that the checkpoint holds is loaded, into fresh memory, though
  // `wanted` does not name it: an optimizer without state does not know its state's names yet.
  std::vector<Path> subtrees = {};
  // Paths below which nothing may be left out, unless not_requested is kReport or kIgnore:
  // Error(kMismatch) naming what the checkpoint holds there and no rank that has this path asks
  // for.
  std::vector<Path> complete = {};
  // What a difference between `wanted` and the checkpoint means. kReport: it stands in the
  // LoadReport, and rank 0 logs it as a warning; kIgnore: it does not. Where a load goes on, the
  // leaf keeps what the template has: a tensor its elements (or none), a value itself. Of what a
  // dialect keeps as one common value, the keys inside are not looked at.
  enum class Policy : uint8_t { kError, kReport, kIgnore };
  Policy not_in_checkpoint = Policy::kError;  // wanted, and the checkpoint has nothing of the key
  // In the checkpoint, and wanted by no rank. nullopt: ignored, but for what is below `complete`.
  std::optional<Policy> not_requested = std::nullopt;
  Policy other_shape = Policy::kError;  // wanted in another global shape than is stored
  // In a dialect that has a common state: it is neither read nor given back. The result then has
  // the template's leaves and no others; a leaf that is not wrapped is the stored item whose key is
  // its path.
  bool sharded_only = false;
  // Before tensors and objects are read: what the ranks want is what a save would take with its
  // option of this name. (Of a rank that wants everything, without a template, nothing is asked.)
  bool validate_access = false;
  // The two policies before look at sharded objects by the key of their grid: one is in the
  // checkpoint when any of its grid is, requested when any of its grid is, and reported under the
  // grid's key. (A load fails where one is wanted that is not stored and others of its grid are.)
  bool objects_by_grid = false;
  bool log_report = true;  // what the report has is logged by rank 0, as that rank's option says
  double timeout = kDefaultTimeout;
  // Memory of this rank, bytes: the pool's, and in two-phase reading the messages'.
  uint64_t buffer_bytes = BufferPool::kDefaultTotal;
  int threads = 0;
  ProgressFn progress = nullptr;
  std::shared_ptr<const Interrupt> interrupt = nullptr;  // as in SaveOptions
};

// What the ranks of a load found of keys, as far as LoadOptions says kReport: the union over all
// ranks, the same on each; sorted.
struct LoadReport {
  std::vector<std::string> not_in_checkpoint;
  std::vector<std::string> not_requested;
  std::vector<std::string> other_shape;
  friend bool operator==(const LoadReport&, const LoadReport&) = default;
};

struct OpenOptions {
  std::shared_ptr<const Format> format = nullptr;
  bool verify_checksums = true;
  CachePolicy cache = CachePolicy::kBypass;  // what reads leave in the page cache
  uint64_t buffer_bytes = BufferPool::kDefaultTotal;
  int threads = 0;
  std::shared_ptr<const Interrupt> interrupt = nullptr;  // as in SaveOptions, for the opening
};

}  // namespace tilestone
