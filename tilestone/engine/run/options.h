// Options of save, load and Checkpoint. Each option has a default that suits most callers. Options
// that belong together are one struct. No environment variable changes them. A number outside its
// limits is Error(kInvalidArgument) with the option's name, on every rank.
//
// The structs are the table of options. `tools/options --fix` makes from their fields what goes
// over all of them: the binding, the options of Python with their types, defaults, checks and
// explanations (the comments here), docs/options.md, and which options the ranks compare: those
// whose comment says "Must be the same on every rank" (of a save, or of a load). Otherwise every
// rank throws Error(kMismatch), which names the option.
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
// first use: kUnsupported for a URL of a store that this build does not know, and for
// "s3:/bucket/x", which pathlib makes of "s3://bucket/x"; kInvalidArgument for a path that is empty
// or contains NUL, and for an unknown home directory. "./~" and "./s3:/x" name directories that are
// literally called so.
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
  // The same location for one call: see Storage::until().
  Location until(const Deadline& deadline) const;

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

// A save in which the ranks communicate only through small files at the path.
//
// This needs no process group, and does not use an existing one. The ranks decide without
// communication who writes what, and need not call at the same time; the data of each rank stays on
// disk until the last rank publishes the checkpoint. A shard whose holders are declared or known
// from placements is written once, by one of them. Any other shard is written by each rank that has
// a main replica of it, and these replicas must be equal. Objects that are not wrapped must be on
// every rank. Only for torch_dist, without `overwrite` and `checks.access`, and only to a path
// without a checkpoint. See docs/saving_by_files.md.
//
// `save` needs the first three fields. In a `Session` with a group they come from the group.
struct ByFiles {
  // The number of this rank. If the state has DTensors, it must be torch's global rank.
  int rank = 0;
  int world_size = 1;  // how many ranks save; the same on all ranks
  // A string of 8 to 256 bytes, the same on all ranks of one run of the job and different in every
  // other run, also when the scheduler starts the same job again. A rank that was restarted saves
  // the same state under the same token and so completes the checkpoint. What it wrote before is
  // not written again, and a warning says so; a state with other keys, shapes, dtypes or shards is
  // Error(kMismatch).
  std::string token = {};
  // Distinguishes saves that have the same token and the same path. A different state needs a
  // different number. A session counts its saves itself.
  uint64_t number = 0;
  // true: return once the checkpoint is published. false: return once this rank has written its
  // part. The last rank to write then publishes, and SaveResult::published says whether that was
  // this rank.
  bool wait = true;
  // As with torch's use_collectives=False, each rank writes everything that it holds, replicas
  // included, and `__RANK.metadata` describes what it has written. Torch's ranks can load these
  // files. They appear once all ranks have written, which `wait` waits for, and `published` of the
  // result says. `publish` turns such a checkpoint into an ordinary one.
  bool torch_rank_local = false;
};

// Each rank also writes to its own data file what it holds and another rank of its group writes,
// and objects that are equal here and on the rank that writes them. After a restart with the same
// sharding the rank then reads no other file for them. Only the manifest lists copies, so stock
// PyTorch does not see them. Replicas must hold equal elements, else the save is Error(kMismatch)
// with the key. By files only arrays with known holders are copied, and replicas whose id has
// Megatron's three numbers and ends with 0. Either all ranks of a save give copies or none.
// Error(kUnsupported) in formats that store each chunk in its own file.
struct LocalCopies {
  // The ranks whose shards this rank copies, itself included: a torch process group that it belongs
  // to, or rank numbers in the group that saves. Usually this is the model-parallel group. With the
  // data-parallel group every rank would copy everything that it shares, up to the whole model.
  // `save` needs it; in `tilestone.megatron.save`, nullopt is the model-parallel group of
  // Megatron's parallel_state.
  std::vector<int> group = {};
  // The most bytes of elements and of objects' items that this rank copies, smallest first, because
  // a small copy saves as many reads as a large one; nullopt: no limit. `SaveResult.copies` and
  // `copy_bytes` say what was copied.
  std::optional<uint64_t> max_bytes = std::nullopt;
};

// What is checked. Each call uses the fields that concern it, so one value may serve all calls of a
// program.
struct Checks {
  enum class Differing : uint8_t { kIgnore, kWarn, kError };
  // `save`: before anything is written, check that the main replicas of all ranks (those whose
  // replica_id is 0) hold every element of each array and every cell of each grid of ShardedObjects
  // exactly once, and raise an error if not. Arrays that are not wrapped count once. Without this
  // option, shards of the same box count as replicas of each other whatever their replica_ids are,
  // and a grid may have empty cells. Not possible by files. `load`: before arrays and objects are
  // read, check the same of what the ranks want; a rank that loads everything, without a template,
  // is not checked. Must be the same on every rank.
  bool access = false;
  // `save`: what to do when the ranks differ in something of which only one rank's version is
  // saved: objects (the order of a dict does not matter) and their replicas, Megatron-Core's common
  // state, and replicas of arrays of at most 64 KiB. Larger arrays are compared only where DTensors
  // of one key are on disjoint meshes; if they differ, the save is refused with kWarn too. kIgnore:
  // compare nothing. kWarn: rank 0 logs the keys and the ranks, each once; in Megatron-Core's
  // dialect the other ranks log their own keys. kError: Error(kMismatch) on every rank, before
  // anything is written. Must be the same on every rank of a save.
  Differing common_differs = Differing::kWarn;
  // `load` and `open`: check every byte that is read; whole blocks of 64 KiB to 4 MiB are read for
  // this. Items without checksums of blocks (of other writers, or of earlier versions) are checked
  // if one rank, or several together, read them whole; the log says if parts were not. false: read
  // exactly what is wanted, unchecked. Must be the same on every rank of a load.
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

// What a load does about differences between the templates and the checkpoint.
//
// kError raises; kReport lists the key in `report` and in a warning of rank 0; kIgnore goes on
// without a warning. If the load continues, the leaf keeps its value from the template. The three
// policies don't apply to values, lists and arrays in the common state (Megatron-Core's dialect):
// the common state comes back as it was saved, and an array of another shape in it is always an
// error.
struct Differences {
  enum class Policy : uint8_t { kError, kReport, kIgnore };
  // A wanted key that the checkpoint doesn't hold. Must be the same on every rank.
  Policy not_in_checkpoint = Policy::kError;
  // A key of the checkpoint that no rank wants. nullopt: an error below the key of an object with
  // state_dict(); below other dicts and lists of the template one warning, with keys and bytes;
  // ignored elsewhere. `report` lists what is below dicts and lists whatever this says. Must be the
  // same on every rank.
  std::optional<Policy> not_requested = std::nullopt;
  // A tensor whose wanted global shape differs from the stored one. Must be the same on every rank.
  Policy other_shape = Policy::kError;
  // Receives what is reported; its lists are emptied first. If the load_state_dict() of an object
  // raises, the report and the arrays are already filled.
  LoadReport* report = nullptr;
};

// How files are read.
struct Reading {
  enum class TwoPhase { kAuto, kAlways, kNever };
  // `load`: whether data that several ranks want, or that one rank would need many short reads for,
  // is read once by one rank for all. kAuto: through the page cache of files if all ranks run on
  // one host, otherwise by messages. kAlways: by messages. kNever: each rank reads for itself. Must
  // be the same on every rank.
  TwoPhase two_phase = TwoPhase::kAuto;
  // kKeep leaves what is read in the page cache, so that another load of the same files needs no
  // disk. kBypass reads large tensors without the page cache, which leaves that memory to others.
  // nullopt: keep where what is read fits into half of the memory that is available
  // (docs/cache.md); `verify` keeps only with kKeep. Data that is already in the cache is read from
  // there in any case, and ranks of one host that read for one another through the page cache leave
  // what they read there.
  std::optional<CachePolicy> cache;
  // Read files through any symbolic link that leads out of the directory. Without it, the only such
  // links that are followed lead into a directory "blobs" next to the checkpoint or next to one of
  // its parent directories, as in the Hugging Face hub's cache. Other links are Error(kUnsafe),
  // because a checkpoint from somebody else could name any file that you may read (docs/links.md).
  bool follow_links = false;
};

// What a call uses of the machine, on this rank.
struct Resources {
  int threads = 0;  // number of threads; 0: as many as the machine has, at most 8
  // Pooled memory, in bytes; in two-phase reading also for the messages.
  uint64_t buffer_bytes = kDefaultBufferBytes;
  int files_per_rank = 1;  // `save`: number of data files that each rank writes
};

// The options of a save.
struct SaveOptions {
  Communicator comm = {};  // default: a group of one
  // The file format. "torch_dist" is PyTorch's. "zarr" can be read by Megatron-Core up to 0.15, the
  // zarr package and tensorstore. With zarr, each array must be sharded into the cells of one
  // regular grid, its dtype must be one of numpy's or bfloat16, keys are file paths, and the ranks
  // need a communicator. Must be the same on every rank.
  std::shared_ptr<const Format> format = nullptr;  // torch_dist
  // Which parts of the state are sharded. "pytorch": as described under `state`; stock PyTorch can
  // load the checkpoint. "megatron": only `ShardedTensor`, `ShardedObject`, DTensors and
  // Megatron-Core's entities are sharded. Everything else, arrays included, forms one common state,
  // which is saved from rank 0; stock Megatron-Core (0.9 and later) can load the checkpoint. Must
  // be the same on every rank.
  std::shared_ptr<const Dialect> dialect = nullptr;  // pytorch
  std::optional<ByFiles> by_files = std::nullopt;    // with it, `comm` is a group of one
  // Replace a valid checkpoint at `path`; without this, saving there is Error(kAlreadyExists). The
  // old one stays valid until the new one is durable. With format zarr or Megatron-Core's dialect,
  // and when the old checkpoint is of one of these kinds, a new directory is built beside the old
  // one and replaces it as a whole, in one step. Not possible by files. Must be the same on every
  // rank.
  bool overwrite = false;
  Checks checks = {};  // what is checked
  // Also write copies of what other ranks write; nullopt: each shard is written once.
  std::optional<LocalCopies> copies = std::nullopt;
  // An earlier checkpoint, of which nothing is written again: arrays (of 16 KiB and more) whose
  // bytes are those that it holds under the same key are in files that both checkpoints share, from
  // the second save on that finds them unchanged (docs/run_directories.md). nullopt: everything is
  // written. Without effect in format zarr; not with ByFiles.torch_rank_local.
  std::optional<Location> reuse = std::nullopt;
  Resources resources = {};  // threads, memory and files
  double timeout =
      kDefaultTimeout;  // seconds for the whole call, more than 0; kNoTimeout: no limit
  // In Megatron-Core's dialects: adds names to the index for a tensor KEY that has replicas on
  // tensor-parallel ranks (the second of the three numbers of a replica id): KEY.__tp_replica_0,
  // ..._1, ..., one for each of these ranks. All name the same bytes. They are for a stock
  // Megatron-Core that asks for them; Tilestone itself knows only KEY. Error(kUnsupported) in other
  // dialects, and in formats whose index is the file names. Must be the same on every rank.
  bool tp_replica_names = false;
  // Items whose keys begin with this text go to data files of their own, whose names begin with it
  // too: at most 128 bytes, a part of a file name. "": no such files. Error(kUnsupported) by files,
  // and in formats other than torch_dist. The name is that of Megatron-Core's option.
  std::string separation_hint = {};
  // The caller's ranks meet after the save, to hash the files. The save itself does nothing for it.
  // Must be the same on every rank.
  bool verify_integrity = false;
  // Strings that describe the checkpoint ({"iteration": "100"}), at most 1 MiB in all.
  // `Checkpoint.attributes` returns them, and `tilestone inspect` shows them. Must be the same on
  // every rank.
  std::map<std::string, std::string> attributes = {};
  // Attributes of single tensors, by the tensor's key and the attribute's name ({"layer.w":
  // {"kind": "glu", "order": [0, 1]}}). Values are null, bools, 64-bit ints, floats, strings,
  // bytes, lists, tuples and dicts, nested at most 16 deep and at most 16 MiB in all. Each rank
  // gives attributes of tensors that it holds; those of all ranks are merged.
  // `Checkpoint.tensor_attributes` and `tilestone inspect PATH KEY` return them.
  std::map<std::string, Attributes> tensor_attributes = {};
  // What a CheckpointManager adds (run/inventory.h); only the coordinator's counts. Not by files.
  std::shared_ptr<RunStep> step = nullptr;
  // true shows a bar on a terminal; a function is called with `Progress`.
  ProgressFn progress = nullptr;
  // Another thread may request an interrupt. The save then ends soon, as after any failure: it
  // throws the request's reason here, and Error(kInterrupted) on the other ranks. A request has no
  // effect once the checkpoint is being published.
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};

// The options that a save in the background has beside those of a save.
struct AsyncOptions {
  enum class OnError : uint8_t { kRaise, kWarn };
  enum class InFlight : uint8_t { kWait, kFail, kSkip };
  // What happens when a save fails and a rank does not ask for its result. kRaise: the next save of
  // the session, or of the group, raises the error on every rank, and does nothing else. kWarn: it
  // logs it and saves. With kWarn, a failure of the storage or of another rank before the call
  // returns (StorageError, NotFoundError, TimeoutError, RankFailedError) is not raised either: it
  // is logged, and is the result of the save. A state or an option that can't be saved is always an
  // error. With a communicator it must be equal on all ranks.
  OnError on_error = OnError::kRaise;
  // What happens if the previous save has not ended on some rank. kWait: wait for it. kFail:
  // Error(kAlreadyExists) on every rank. kSkip: save nothing, on every rank (AsyncSave::skipped);
  // not possible by files. With a communicator it must be equal on all ranks.
  InFlight in_flight = InFlight::kWait;
  // The most memory that this rank uses for copies of arrays, in bytes. Arrays that do not fit are
  // written before the call returns. nullopt: all are copied. Not possible by files.
  std::optional<uint64_t> max_staged_bytes = std::nullopt;
};

// The `count` steps whose metric of this name is the lowest or the highest. Steps without the
// metric, and those where it is NaN, are never among them.
struct Best {
  enum class Mode : uint8_t { kMin, kMax };
  std::string metric;
  Mode mode = Mode::kMin;
  size_t count = 1;
};

// Which checkpoints of a run a `CheckpointManager` keeps: those that any of these rules keeps.
//
// Only complete checkpoints are removed, and only those of steps that the one that has just become
// durable continues. Steps of other runs stay. Those of a branch that the run has left when it went
// back are removed once `last` newer ones are durable, whatever the other rules say.
struct Keep {
  size_t last = 1;  // how many of the newest; at least 1
  // Those whose step is a multiple of it; nullopt, in C++ 0: no such rule.
  uint64_t every = 0;
  // (metric, "min" or "max", count): the `count` steps whose metric of this name is the lowest or
  // the highest. Steps without that metric, or where it is NaN, don't count.
  std::optional<Best> best = std::nullopt;
  // Those that were saved less than this many seconds ago, and those of unknown age.
  std::optional<double> newer_than = std::nullopt;
};

struct SaveResult {
  std::string save_id;
  uint64_t bytes_written = 0;  // the bytes that this rank has written
  uint64_t items_written = 0;  // the items that this rank has written, without copies
  uint64_t copies = 0;         // the copies that this rank has written of other ranks' shards
  uint64_t copy_bytes = 0;     // the bytes of these copies, which bytes_written includes
  // The bytes of this rank's items in files of an earlier checkpoint (`reuse`), not written anew.
  uint64_t bytes_shared = 0;
  // Whether the ranks' common states were compared and differ (Checks::common_differs).
  bool common_differs = false;
  // Whether the checkpoint exists. False only by files without `wait`: others still write.
  bool published = true;
  // Seconds of this rank's steps: "preparing" (in Python, the state), "planning", "staging" (if it
  // was taken), "writing", "reporting" and "publishing". What came between them is in none of them.
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

// The options of a load.
struct LoadOptions {
  Communicator comm = {};
  // Load alone, as this rank of the job (0 or more), without communication; `group` must not be
  // given. From a rank-local checkpoint (torch's use_collectives=False) this rank reads only its
  // own metadata if that holds everything wanted, just as this rank wrote it; otherwise it reads
  // the metadata of all ranks. Other ranks need not call.
  std::optional<int> own_rank = std::nullopt;
  // The file format, "torch_dist" or "zarr"; nullopt: found from the files. Must be the same on
  // every rank.
  std::shared_ptr<const Format> format = nullptr;
  // The dialect of a checkpoint of which no file names one: Megatron-Core's, before metadata.json
  // is written. Default: PyTorch's. Must be the same on every rank.
  std::shared_ptr<const Dialect> unmarked = nullptr;
  // Convert from the stored dtype to the wanted one where they differ, as torch's .to() does; but
  // what is too large for float8_e4m3fn or an integer becomes the nearest, NaN the integer 0.
  bool cast = false;
  Differences differences = {};  // what to do about differences between templates and checkpoint
  Checks checks = {};            // what is checked
  Reading reading = {};          // how files are read
  Resources resources = {};      // threads, memory and files
  double timeout =
      kDefaultTimeout;  // seconds for the whole call, more than 0; kNoTimeout: no limit
  // Gives the checkpoint's keys the names that `state` has: a function of a key, such as
  // `tilestone.strip_prefix("_orig_mod.")`, or pairs (ECMAScript regular expression, replacement):
  // the first one that is found in a key replaces what it finds. An empty name hides the key. Must
  // be the same function on all ranks. Keys of a common state keep their names.
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
  // the leaf's path. Must be the same on every rank.
  bool sharded_only = false;
  // not_in_checkpoint and not_requested treat the sharded objects of one grid as one: the grid is
  // in the checkpoint, or requested, when any of its objects is, and it is reported under the
  // grid's key. The load still fails when a wanted object is not stored but others of its grid are.
  // Must be the same on every rank.
  bool objects_by_grid = false;
  bool log_report = true;  // rank 0 logs the report; only rank 0's option counts
  // true shows a bar on a terminal; a function is called with `Progress`.
  ProgressFn progress = nullptr;
  std::shared_ptr<const Interrupt> interrupt = nullptr;  // as in SaveOptions
};

// The options of opening a checkpoint.
struct OpenOptions {
  // The file format, "torch_dist" or "zarr"; nullopt: found from the files.
  std::shared_ptr<const Format> format = nullptr;
  std::shared_ptr<const Dialect> unmarked = nullptr;     // as in LoadOptions
  Checks checks = {};                                    // what is checked
  Reading reading = {};                                  // how files are read
  Resources resources = {};                              // threads, memory and files
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
