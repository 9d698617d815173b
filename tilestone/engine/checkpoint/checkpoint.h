// A checkpoint opened for reading by one process, without a template.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/engine/run/options.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/value.h"

namespace tilestone {

namespace engine {
class MappedReads;
}

// A damaged place that verify found.
struct Damage {
  std::string file;     // "": elements of a tensor that no file holds
  uint64_t offset = 0;  // bytes, in the file
  uint64_t size = 0;    // bytes; the damage lies within this range
  std::string key;      // "": the bytes belong to no item
  std::string problem;
  bool unsafe = false;  // looks like an attack, not like damage; reads throw Error(kUnsafe)
  bool copy = false;    // a copy is damaged, not the item that the index names
  // The file with an intact instance of the same item, which loads read instead. For an item that
  // repair has encoded anew, the file of the index that describes it. "": there is none.
  std::string intact_in = {};
  // Where the damaged item begins in the file, according to the checkpoint. `offset` may lie inside
  // the item, or at the end of a file that is too short. nullopt: no single item is damaged.
  std::optional<uint64_t> item_offset = {};
  bool beyond_end = false;  // the item reaches beyond the end of its file
};

// A data file that is shorter than it should be.
struct ShortFile {
  std::string file;
  uint64_t size = 0;      // bytes
  uint64_t expected = 0;  // bytes: that its save has written, or else that its items need
  uint64_t keys = 0;      // keys with items that reach beyond its end
  std::string first_key;  // one of them
};

struct VerifyReport {
  uint64_t files = 0;
  uint64_t items = 0;
  uint64_t bytes = 0;                   // bytes checked
  uint64_t items_without_checksum = 0;  // items whose writer recorded no checksum
  std::vector<Damage> damages;          // ordered by file and offset
  std::vector<ShortFile> short_files;   // in the order of their names
  std::vector<std::string> notes;       // what the files have beside the checkpoint
  double seconds = 0;
  bool ok() const { return damages.empty(); }
  bool any_unsafe() const;
};

// What is recorded about the save that wrote a checkpoint: in the manifest, or for a rank-local
// checkpoint in the head of its save.
struct SaveRecord {
  int world_size = 1;
  std::vector<std::string> hosts;  // by rank; "": unknown; empty if only a head exists
  std::map<std::string, std::string> attributes;  // SaveOptions::attributes
  // What each rank did until its data was durable, by rank and in order. Empty if not recorded.
  struct Step {
    std::string name;  // "planning", "staging", "writing"
    double began = 0;  // seconds since 1970, by the clock of the rank's host
    double seconds = 0;
  };
  std::vector<std::vector<Step>> steps = {};
};

// What verify has read of files that several checkpoints share (SaveOptions::reuse). Used by one
// thread at a time.
class VerifiedFiles {
 public:
  VerifiedFiles();
  ~VerifiedFiles();
  // All names of each damaged file that several of the checkpoints have.
  std::vector<std::vector<std::string>> damaged() const;

  struct State;
  State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// Thread-safe. Cheap to copy: copies share one open checkpoint. If a save has replaced the
// checkpoint, reads and verify throw Error(kNotFound) with a hint, because the files are gone. If
// only a data file is missing, reads throw Error(kCorrupt), and verify reports it. A child process
// of fork() may use a Checkpoint that its parent has opened, at any time: the child gets its own
// threads, buffers and queues, and neither process affects the other.
class Checkpoint {
 public:
  // Throws Error(kNotFound) if there is no checkpoint, kCorrupt, or kUnsafe.
  static Checkpoint open(const Location& location, const OpenOptions& options = {});

  // Returns the same open checkpoint with an interrupt: once `interrupt` is requested, reads and
  // verify end soon and throw the reason of the request.
  Checkpoint with_interrupt(std::shared_ptr<const Interrupt> interrupt) const;

  // Returns the same open checkpoint, whose reads of whole tensors return the files' own bytes
  // where they can: private mappings, copy-on-write, which are not checked, and of which no byte is
  // read before it is touched. Who touches a mapped file that was shortened in place is ended by
  // SIGBUS. A tensor is mapped if one item holds it, as one run of aligned bytes in a local file
  // system; others are read. All reads of a tensor return the same memory. Error(kUnsupported) for
  // an object store.
  Checkpoint mapped() const;

  const Metadata& metadata() const;
  std::string_view format_name() const;  // "torch_dist"
  int format_version() const;
  std::optional<int> rank_of_file(std::string_view name) const;  // that wrote a data file of ours
  std::string_view dialect_name() const;                         // "pytorch"
  const Format& format() const;
  const Dialect& dialect() const;
  const std::optional<SaveRecord>& save_record() const;  // nullopt: nothing recorded
  std::vector<std::string> keys() const;                 // tensors and objects, sorted

  // Reads a whole tensor, or one box of it, into new contiguous memory. Throws Error(kNotFound)
  // with similar keys in the hint, and kCorrupt if the files are too small for what the metadata
  // promises; this is checked before memory is allocated.
  TensorView read(const std::string& key, const std::optional<Box>& box = std::nullopt) const;
  // Reads whole tensors as read() does, and returns them in the order of `keys`. They are read
  // together: many small tensors cost a few large reads, not one read each.
  std::vector<TensorView> read_many(std::span<const std::string> keys) const;
  // As read(), into `target`, which must have the box's shape and the stored dtype; otherwise
  // throws Error(kInvalidArgument).
  void read_into(const std::string& key, const std::optional<Box>& box,
                 const TensorView& target) const;
  // A box of a tensor, and the memory that receives it.
  struct Part {
    std::string key;
    Box box;
    TensorView target;
  };
  // Reads all parts as read_into() does. They are read together, as by read_many().
  void read_parts(std::span<const Part> parts) const;
  Value read_object(const std::string& key) const;
  // The state that is not sharded, as one dict, in dialects that store it as one value
  // (Megatron-Core's). nullopt in other dialects. Throws Error(kCorrupt) if it is damaged or
  // missing.
  std::optional<Value> common() const;
  bool has_common() const;  // whether the dialect is such a one
  // The decoded bytes of an object's item (in torch_dist a torch.save archive).
  Bytes read_object_bytes(const std::string& key) const;

  // Reads every byte and checks every checksum, structure and size. Damage is reported, not thrown,
  // and so are bytes that the disk can't read (EIO). Throws only what prevents reading: other kIo,
  // and kNotFound if a save has replaced the checkpoint.
  // `shared`: of the checkpoints that were verified before; what was read for them is not read
  // again. null: everything is read.
  VerifyReport verify(const ProgressFn& progress = {}, VerifiedFiles* shared = nullptr) const;

 private:
  struct State;
  explicit Checkpoint(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
  std::shared_ptr<const Interrupt> interrupt_;
  std::shared_ptr<const engine::MappedReads> mapped_;  // null: not mapped
};

// Rewrites damaged files of a checkpoint from their intact parts and from copies.

struct RepairReport {
  // Damages, as found before the repair. What another repair has mended meanwhile is left out.
  std::vector<Damage> mended;
  VerifyReport now;  // what verify finds after the repair
};

// Verifies the checkpoint, and repairs:
//  - each damaged chunk, object, or copy of one that is intact in another file;
//  - bytes between items, which must be zero, and extra bytes at the end of a file;
//  - a file that is missing or too short, if everything that it should hold is intact, in the file
//    itself or elsewhere. Otherwise the file stays as it is, and its damage in `now` lists what is
//    intact nowhere.
//
// Each file is replaced as a whole, in one rename, by a file that has the checksums recorded by its
// save. At any moment, also after a crash, the file is either the old one or the repaired one.
// Damage without an intact copy remains, and `now` reports it. A checkpoint without a manifest is
// only verified. Without damage, nothing is written, not even a lock file.
//
// `progress` reports the verifications ("verify") and between them the writing of new files
// ("repair"). An interrupt stops verification and repair; files that were replaced before it stay
// replaced. Throws what Checkpoint::open and verify throw; kAlreadyExists if there is damage and a
// save or another repair is in progress; kUnsupported if the storage has no locks; kIo also if
// bytes for a new file differ when they are read a second time.
RepairReport repair(const Location& location, const OpenOptions& options = {},
                    const ProgressFn& progress = {});

}  // namespace tilestone
