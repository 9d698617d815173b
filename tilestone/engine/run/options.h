// Options of save, load and Checkpoint. Each option has a default that suits most callers. Options
// that belong together are one struct. The structs and most options have the same names and fields
// in Python, which finds out the others itself (such as `complete`). No environment variable
// changes them. A number outside its limits is Error(kInvalidArgument) with the option's name, on
// every rank.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "tilestone/base/cache_policy.h"
#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

// Where a checkpoint is, or where one is saved.

class Storage;
struct PosixOptions;

// A directory of a file system, or any storage. One location holds one checkpoint. The path of a
// safetensors file, or of a file of torch.save (.pt, .pth, .bin, .ckpt), is a location for reading
// that has only this file.
//
// A path is checked when the location is first used. Constructing a Location from a bad path
// therefore never fails; the save or load fails instead, and reports the error to all ranks. A
// relative path is resolved against the working directory at that moment. A leading "~" or "~user"
// is the user's home directory, as in a shell ($HOME, else the system's user database). Errors at
// first use: kUnsupported for a URL ("s3://bucket/x", and "s3:/bucket/x", which pathlib makes of
// it); kInvalidArgument for a path that is empty or contains NUL, and for an unknown home
// directory. "./~" and "./s3:/x" name directories that are literally called so.
//
// Copies of a Location share the storage. Thread-safe.
class Location {
 public:
  Location(const char* path) : Location(std::string(path)) {}
  Location(const std::string& path);
  Location(const std::string& path, const PosixOptions& options);
  Location(const std::filesystem::path& path) : Location(path.string()) {}
  Location(std::shared_ptr<Storage> storage);

  Storage& storage() const { return *shared(); }
  const std::shared_ptr<Storage>& shared() const;
  // The absolute path, or how the storage describes itself.
  std::string describe() const;
  bool has_files() const;  // whether any file is there
  // The text that must be equal on every rank of a save or load: the absolute path, lexically
  // normal (symbolic links are not followed), or how the storage describes itself.
  std::string identity() const;
  // identity() with symbolic links followed as far as directories exist: the same for each path
  // that leads to one directory.
  std::string resolved_identity() const;
  // identity(), or "" where that fails: using the location then reports the error.
  std::string identity_or_empty() const noexcept;
  // A directory within this location, by its name. A path is continued, so that the directory may
  // be a symbolic link; of a storage it is the child.
  Location within(const std::string& name) const;
  // The same location, where files are read through any symbolic link that leads out of the
  // directory (Reading::follow_links). A location made from a storage is returned as it is.
  Location following_links() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

class Dialect;  // format_named() and dialect_named() in known.h give these
class Format;

struct RunStep;

// The progress of a long operation. ProgressFn is called from one thread at a time, at most about
// ten times a second, and once at the end. Any exception that it throws ends the operation on this
// rank and is rethrown unchanged; the other ranks get Error(kInterrupted).
struct Progress {
  std::string_view phase;   // "write", "read", "verify", "repair"
  uint64_t bytes_done = 0;  // by this rank
  uint64_t bytes_total = 0;
  double seconds = 0;  // since the phase began
};
using ProgressFn = std::function<void(const Progress&)>;

inline constexpr double kDefaultTimeout = 1800;  // seconds, for the whole of a save or load
inline constexpr double kNoTimeout = std::numeric_limits<double>::infinity();
// Two buffers of 64 KiB: two-phase reading by messages leaves half of the memory to the pool.
inline constexpr uint64_t kMinBufferBytes = 128u << 10;
inline constexpr uint64_t kDefaultBufferBytes = 256u << 20;
inline constexpr uint64_t kMaxBufferBytes = uint64_t{1} << 44;
inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxFilesPerRank = 1024;
inline constexpr uint64_t kMaxAttributeBytes = 1u << 20;         // all names and values together
inline constexpr uint64_t kMaxTensorAttributeBytes = 16u << 20;  // likewise, per rank

// A save without a communicator: its ranks coordinate only through files at the location. `token`
// and `number` identify the attempt.
struct ByFiles {
  int rank = 0;
  int world_size = 1;
  // Identifies one run of a job: the same text on all its ranks, a new text for every start of the
  // job. A rank that is restarted and uses the same token again promises to save the same
  // state. 8 to 256 bytes.
  std::string token = {};
  uint64_t number = 0;  // counts the saves under this token to this location
  // Wait until the checkpoint is published. Without this, the last rank to write publishes it.
  bool wait = true;
  // Saves as torch does with use_collectives=False: each rank writes everything that it holds,
  // replicas too, and publishes its own `__RANK.metadata` as soon as its data is durable. When all
  // ranks have done so, the location holds a rank-local checkpoint, which publish() turns into an
  // ordinary one. `wait` waits for that; SaveResult::published reports it. Format torch_dist only.
  bool torch_rank_local = false;
};

// Copies of what this rank holds and another rank of its group writes: this rank also writes them
// to its own data file. After a restart with the same sharding it then reads only its own file.
// Only the manifest lists copies; the format's index does not. Replicas must hold equal elements,
// else the save fails with Error(kMismatch) naming the key. By files, shards with declared holders
// are copied, and replicas whose id has Megatron's three numbers and ends with 0. Objects are
// copied where they are equal: unwrapped objects on all ranks, whatever the group; sharded objects
// with a communicator within the group, by files all. Error(kUnsupported) in formats that store
// each chunk in its own file.
struct LocalCopies {
  // Ranks of this save, in any order, each once, including this rank. Each rank gives its own
  // group, usually its model-parallel group: a data-parallel group would make each rank copy
  // everything it shares, up to the whole model. Any other list is Error(kInvalidArgument).
  std::vector<int> group = {};
  // The limit on this rank's copies: bytes of elements and of objects' items; nullopt: none. The
  // smallest copies are written first, because a small one saves as many reads as a large one;
  // among equal sizes the lower key, then the lower box.
  std::optional<uint64_t> max_bytes = std::nullopt;
};

// What a save, a load or an open checkpoint checks. Each uses the fields that concern it, so one
// value may serve all calls of a program.
struct Checks {
  enum class Differing : uint8_t { kIgnore, kWarn, kError };
  // A save, before anything is written: the main replicas of all ranks hold each element of each
  // tensor exactly once, and grids of objects are complete (plan/access.h). Without this, a save
  // accepts any replicas with equal elements, and incomplete grids. A load, before
  // tensors and objects are read: the ranks want what a save would accept with this option; a rank
  // that loads everything, without a template, is not checked.
  bool access = false;
  // Saves: what to do when ranks differ in something that should be equal, of which only one rank's
  // is saved: the common state, objects, replicas of small tensors (plan/contents.h). kIgnore
  // compares nothing. kWarn: rank 0 logs a warning. The warning or error names the paths or keys
  // and the ranks. Larger tensors are compared only on disjoint meshes, where kWarn refuses a
  // difference too: a parameter would be lost.
  Differing common_differs = Differing::kWarn;
  // Loads and open checkpoints: check every byte that is read, by whole blocks
  // (state/chunk_blocks.h). Items without blocks, of other writers and earlier versions, are
  // checked if a rank reads them whole; in two-phase reading by messages also if several ranks
  // together do. false: reads exactly what is wanted.
  bool checksums = true;
};

// One step of a save or load, and how long it took on this rank, with the waiting for other ranks.
struct StepTime {
  std::string step;
  double seconds = 0;
};

// What a load found: the union over all ranks, equal on each rank, sorted.
struct LoadReport {
  std::vector<std::string> not_in_checkpoint;  // if Differences says kReport
  // What no rank requests; unless Differences says kReport only what is below a dict or list of a
  // template (not the root).
  std::vector<std::string> not_requested;
  std::vector<std::string> other_shape;  // if Differences says kReport
  uint64_t bytes_loaded = 0;             // stored bytes of what this rank loaded of tensors
  // "describing" (which checkpoint is there), "choosing" (what to read; objects are read),
  // "exchanging" (with other ranks) and "reading", in this order.
  std::vector<StepTime> timings;
  // Compares the keys.
  friend bool operator==(const LoadReport& a, const LoadReport& b) {
    return a.not_in_checkpoint == b.not_in_checkpoint && a.not_requested == b.not_requested &&
           a.other_shape == b.other_shape;
  }
};

// What a load does about a difference between `wanted` and the checkpoint. kReport: the LoadReport
// lists it, and rank 0 logs a warning. kIgnore: no warning. When the load goes on, the leaf keeps
// what the template has: a tensor its elements (or none), a value itself. Keys that only a
// dialect's common state has are never a difference: a load adds them to what it returns.
struct Differences {
  enum class Policy : uint8_t { kError, kReport, kIgnore };
  Policy not_in_checkpoint = Policy::kError;  // wanted, but the checkpoint lacks the key
  // In the checkpoint, but wanted by no rank. nullopt: an error below LoadOptions::complete; one
  // warning, with keys and bytes, for what else is below a dict or list of a template; else
  // ignored.
  std::optional<Policy> not_requested = std::nullopt;
  Policy other_shape = Policy::kError;  // the wanted global shape is not the stored one
  LoadReport* report = nullptr;         // receives what the load found; must outlive it
};

// How a checkpoint's files are read.
struct Reading {
  // Two-phase reading: one rank reads, for all ranks, what several ranks want and what would take a
  // rank many short reads. For loads.
  enum class TwoPhase {
    kAuto,    // on one host through its page cache, on several hosts by messages
    kAlways,  // by messages, in every group of more than one rank
    kNever,   // each rank reads for itself
  };
  TwoPhase two_phase = TwoPhase::kAuto;
  // What reads leave in the page cache; by default everything, where it fits into half of the
  // available memory (docs/cache.md), and nothing for verify. Ranks of one host that read for one
  // another through the page cache leave what they read there, whatever this option says.
  std::optional<CachePolicy> cache;
  // Read files through any symbolic link that leads out of the directory (docs/links.md). For a
  // location that is a path; any other storage decides itself.
  bool follow_links = false;
};

// What a call uses of the machine, on this rank.
struct Resources {
  int threads = 0;  // 0: one per hardware thread of the machine, at most 8
  // Pooled memory, bytes; in two-phase reading also for the messages.
  uint64_t buffer_bytes = kDefaultBufferBytes;
  int files_per_rank = 1;  // data files that a save writes
};

// These options must be equal on all ranks: format, dialect, overwrite, attributes,
// checks.access, checks.common_differs, whether there are copies, tp_replica_names,
// verify_integrity. Otherwise every rank throws Error(kMismatch), which names the option. The other
// options may differ between ranks.
struct SaveOptions {
  Communicator comm = {};                            // default: a group of one
  std::shared_ptr<const Format> format = nullptr;    // default: torch_dist
  std::shared_ptr<const Dialect> dialect = nullptr;  // default: PyTorch's
  // With this, `comm` is a group of one and the ranks plan by rule. A shard whose holders are
  // declared or known from placements is written once, by one of its holders, such that the load is
  // balanced. Any other shard is written by each rank that has a main replica of it, and these
  // replicas must be equal. Objects that are not wrapped must be on every rank. `overwrite` is
  // Error(kInvalidArgument). Formats whose data files have fixed names (zarr), the dialect
  // megatron_shards, and checks.access are Error(kUnsupported).
  std::optional<ByFiles> by_files = std::nullopt;
  // Replaces a valid checkpoint at the location; the old one stays valid until the new one is
  // durable. Without this, saving there is Error(kAlreadyExists).
  bool overwrite = false;
  Checks checks = {};
  std::optional<LocalCopies> copies = std::nullopt;  // nullopt: each shard is written once
  Resources resources = {};
  double timeout = kDefaultTimeout;  // seconds, more than 0; or kNoTimeout
  // In Megatron-Core's dialects: adds names to the index for a tensor KEY that has replicas on
  // tensor-parallel ranks (the second of the three numbers of a replica id): KEY.__tp_replica_0,
  // ..._1, ..., one for each of these ranks. All name the same bytes. They are for a stock
  // Megatron-Core that asks for them; Tilestone itself knows only KEY. Error(kUnsupported) in other
  // dialects, and in formats whose index is the file names.
  bool tp_replica_names = false;
  // Items whose keys begin with this text go to data files of their own, whose names begin with it
  // too: at most 128 bytes, a part of a file name. "": no such files. Error(kUnsupported) by files,
  // and in formats other than torch_dist. The name is that of Megatron-Core's option.
  std::string separation_hint = {};
  // The caller's ranks meet after the save, to hash the files. The save itself does nothing for it.
  bool verify_integrity = false;
  // Texts about the checkpoint, stored in its manifest: {"iteration": "100"}.
  std::map<std::string, std::string> attributes = {};
  // The same for tensors, by key: values of plain kinds (null, bool, int, float, string, bytes,
  // list, tuple, dict). Each rank may give attributes for tensors that it saves, whether or not it
  // writes them; another key is Error(kInvalidArgument). The attributes that several ranks give a
  // tensor are merged; Error(kMismatch) where two ranks contradict each other.
  std::map<std::string, Attributes> tensor_attributes = {};
  // What a CheckpointManager adds (run/inventory.h); only the coordinator's counts. Not by files.
  std::shared_ptr<RunStep> step = nullptr;
  ProgressFn progress = nullptr;
  // Another thread may request an interrupt. The save then ends soon, as after any failure: it
  // throws the request's reason here, and Error(kInterrupted) on the other ranks. A request has no
  // effect once the checkpoint is being published.
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};

struct SaveResult {
  std::string save_id;
  uint64_t bytes_written = 0;  // by this rank
  uint64_t items_written = 0;  // by this rank, without copies
  uint64_t copies = 0;         // by this rank (SaveOptions::copies)
  uint64_t copy_bytes = 0;     // elements and objects' items; included in bytes_written
  // The ranks' common states were compared and differ (Checks::common_differs).
  bool common_differs = false;
  // False only by files without `wait`: other ranks are still writing.
  bool published = true;
  // "planning", "staging" (only if it was taken), "writing", "reporting" and "publishing", in this
  // order. What a program did between the steps is in none of them.
  std::vector<StepTime> timings = {};
};

// Counts of one rank's session.
struct SessionStats {
  uint64_t saves = 0;            // saves that were planned
  uint64_t plans_exchanged = 0;  // saves for which the ranks sent their plans to rank 0
  // Saves that used the plan of an earlier save. For the saves in neither count, this rank made a
  // new plan alone.
  uint64_t plans_from_cache = 0;
  uint64_t plan_bytes_sent = 0;  // bytes of this rank's plans
  friend bool operator==(const SessionStats&, const SessionStats&) = default;
};

// These options must be equal on all ranks: format, reading.two_phase, checks.checksums (ranks read
// for one another), checks.access, differences, sharded_only, objects_by_grid. Otherwise every rank
// throws Error(kMismatch), which names the option. The other options may differ between ranks.
struct LoadOptions {
  Communicator comm = {};
  // For a load without a communicator: the number of this process among those of its job. In a
  // rank-local checkpoint (torch's kind), only this rank's own metadata is read if it has
  // everything that is wanted, as this rank itself wrote it; otherwise the metadata of all ranks
  // is read. The option has no effect on other checkpoints, on loads of everything, and where
  // differences between `wanted` and the checkpoint are not errors.
  std::optional<int> own_rank = std::nullopt;
  std::shared_ptr<const Format> format = nullptr;  // default: found from the files
  // The dialect of a checkpoint of which no file names one: Megatron-Core's, before metadata.json
  // is written. Must be equal on all ranks. Default: PyTorch's.
  std::shared_ptr<const Dialect> unmarked = nullptr;
  bool cast = false;  // convert from the stored dtype
  Differences differences = {};
  Checks checks = {};
  Reading reading = {};
  Resources resources = {};
  double timeout = kDefaultTimeout;  // as in SaveOptions
  // Names each key of the checkpoint as `wanted` names it; "": the key is hidden. Must be the same
  // function on all ranks. Keys of a common state keep their names.
  std::function<std::string(const std::string&)> rename = nullptr;
  // Paths below which everything in the checkpoint is loaded into fresh memory, even if `wanted`
  // does not name it: an optimizer without state does not know the names of its state yet.
  std::vector<Path> subtrees = {};
  // An empty dict or list of `wanted` on every rank asks for what the checkpoint has below its
  // path, where the arrays are whole on this rank (read/empty_places_internal.h says when).
  // Otherwise the load is Error(kMismatch), unless differences.not_requested is kReport or kIgnore.
  bool fill_empty = true;
  // Paths for which the same holds without an empty dict there, whatever other ranks have.
  std::vector<Path> unmade = {};
  std::vector<Path> kept_empty = {};  // paths of empty dicts that ask for nothing all the same
  // Paths below which everything must be requested, unless differences.not_requested is kReport or
  // kIgnore. Error(kMismatch) names the keys that the checkpoint has there and that are requested
  // by no rank that lists the path.
  std::vector<Path> complete = {};
  // In a dialect that has a common state: the common state is neither read nor returned. The result
  // has exactly the template's leaves; a leaf that is not wrapped is the stored item whose key is
  // the leaf's path.
  bool sharded_only = false;
  // not_in_checkpoint and not_requested treat the sharded objects of one grid as one: the grid is
  // in the checkpoint, or requested, when any of its objects is, and it is reported under the
  // grid's key. The load still fails when a wanted object is not stored but others of its grid are.
  bool objects_by_grid = false;
  bool log_report = true;  // rank 0 logs the report; only rank 0's option counts
  ProgressFn progress = nullptr;
  std::shared_ptr<const Interrupt> interrupt = nullptr;  // as in SaveOptions
};

struct OpenOptions {
  std::shared_ptr<const Format> format = nullptr;     // default: found from the files
  std::shared_ptr<const Dialect> unmarked = nullptr;  // as in LoadOptions
  Checks checks = {};
  Reading reading = {};
  Resources resources = {};
  std::shared_ptr<const Interrupt> interrupt = nullptr;  // as in SaveOptions, while opening
};

// The leaves of a template that a load did not fill.

// The leaves of one rank's template that were not loaded, because LoadOptions's policies allowed
// it. They keep the template's values.
struct KeptLeaves {
  std::unordered_set<std::string> keys;   // of items; these identify wrapped entities
  std::unordered_set<std::string> paths;  // dotted; these identify unwrapped leaves
};

// A step of a save that ends on another thread.

// Copies refer to the same step. Thread-safe. In a child process of fork() a step that has not
// ended still belongs to the parent: every function then throws Error(kUnsupported).
class Pending {
 public:
  struct State;
  explicit Pending(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // Whether the step has ended, well or not.
  bool done() const;
  // Waits until the step has ended or the deadline has passed; returns done(). Throws the reason of
  // the deadline's interrupt.
  bool wait(Deadline deadline = Deadline::never()) const;
  // Waits likewise, then throws the error with which the step has ended, if there is one.
  // Error(kTimeout) if it has not ended after `timeout` seconds; the step goes on.
  void get(double timeout = kNoTimeout) const { get(Deadline::after(Seconds(timeout)), timeout); }
  void get(Deadline deadline, double timeout) const;
  // Calls `callback` when the step has ended: on the thread that ends it, or now on the calling
  // thread. What it throws is logged.
  void on_done(std::function<void()> callback) const;

 private:
  using Seconds = std::chrono::duration<double>;
  std::shared_ptr<State> state_;
};

}  // namespace tilestone
