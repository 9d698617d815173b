// A checkpoint opened for reading, without a template and without ranks.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/value.h"

namespace tilestone {

// A damaged place that verify found.
struct Damage {
  std::string file;     // "" for elements of a tensor that are in no file
  uint64_t offset = 0;  // bytes
  uint64_t size = 0;    // bytes of the range that is known to hold the damage
  std::string key;      // "" for bytes outside items
  std::string problem;
  bool unsafe = false;  // looks like an attack, not like damage: refused as kUnsafe
  bool copy = false;    // of a copy of a chunk; the chunk's own item is in another file
  // A file in which the same elements are intact, where loads read them; "": none.
  std::string intact_in = {};
  // Where the damaged item begins in the file, as the checkpoint has it: `offset` may lie within
  // it, or end where the file does. nullopt: of no item.
  std::optional<uint64_t> item_offset = {};
};

struct VerifyReport {
  uint64_t files = 0;
  uint64_t items = 0;
  uint64_t bytes = 0;                   // checked
  uint64_t items_without_checksum = 0;  // their writer recorded none
  std::vector<Damage> damages;          // ordered by file and offset
  double seconds = 0;
  bool ok() const { return damages.empty(); }
  bool any_unsafe() const;
};

// What its manifest or, of a rank-local one, its head records of the save that wrote a checkpoint.
struct SaveRecord {
  int world_size = 1;
  std::vector<std::string> hosts;                 // by rank; "": not known; of a head none
  std::map<std::string, std::string> attributes;  // SaveOptions::attributes
};

// Thread-safe; cheap to copy (copies share one open checkpoint). Once a save has replaced the
// checkpoint, what it read from is gone: Error(kNotFound) with a hint, also from verify. A child of
// fork may use one that its parent has opened, at any time: it gets threads, buffers and queues of
// its own, and neither notices the other.
class Checkpoint {
 public:
  // Error(kNotFound) when no checkpoint is there; kCorrupt, kUnsafe.
  static Checkpoint open(const Location& location, const OpenOptions& options = {});

  // The same open checkpoint; its reads and verify end soon once `interrupt` was requested, and
  // throw the request's reason.
  Checkpoint with_interrupt(std::shared_ptr<const Interrupt> interrupt) const;

  const Metadata& metadata() const;
  const Format& format() const;
  const Dialect& dialect() const;
  const std::optional<SaveRecord>& save_record() const;  // nullopt: nothing is recorded
  std::vector<std::string> keys() const;                 // of tensors and objects, sorted

  // A whole tensor, or one box of it, in fresh contiguous memory (or in `target`, of the box's
  // shape and the stored dtype). Error(kNotFound) with similar keys in the hint; kCorrupt, before
  // memory is taken, when the files are too small for what the metadata promises.
  TensorView read(const std::string& key, const std::optional<Box>& box = std::nullopt) const;
  // Whole tensors, in the order of the keys, as read() gives each. All are read together: many
  // small ones cost a few large reads, not one each.
  std::vector<TensorView> read_many(std::span<const std::string> keys) const;
  void read_into(const std::string& key, const std::optional<Box>& box,
                 const TensorView& target) const;
  Value read_object(const std::string& key) const;
  // What is not sharded, in dialects that keep it as one value (Megatron-Core's): a dict. nullopt
  // in the others. Error(kCorrupt) when it is damaged or missing.
  std::optional<Value> common() const;
  // The bytes of an object's item after decoding (a torch.save archive in torch_dist).
  Bytes read_object_bytes(const std::string& key) const;

  // Reads every byte and checks every checksum, structure and size. Damage is reported, not
  // thrown; only what keeps it from reading at all is (kIo).
  VerifyReport verify(const ProgressFn& progress = {}) const;

 private:
  struct State;
  explicit Checkpoint(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
  std::shared_ptr<const Interrupt> interrupt_;
};

}  // namespace tilestone
