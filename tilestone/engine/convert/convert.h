// Copies a checkpoint into another format or dialect, or a part of it, under other keys.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/geometry/box.h"

namespace tilestone {

// Renames keys: where `pattern`, an ECMAScript regular expression, is found in a key, the first
// occurrence is replaced by `replacement`, in which "\1" and "$1" are groups. Of several rules the
// first one that is found counts. A key that becomes empty is left out.
struct RenameRule {
  std::string pattern;
  std::string replacement;
};
// "REGEX=NAME", split at the last "=". Error(kInvalidArgument), naming the rule, if there is no "="
// or REGEX is not a regular expression.
RenameRule parse_rename_rule(const std::string& text);
// The rules of a file's text: one in each line. Empty lines and lines that begin with "#" are
// ignored.
std::vector<RenameRule> parse_rename_rules(const std::string& text);

struct ConvertOptions {
  // "torch_dist", "zarr", "safetensors", which makes one file if the target's name ends with
  // .safetensors, "torch_checkpointing", or "torch_save", which always makes one file. "":
  // torch_save if the target's name ends with .pt or .pth; safetensors if it ends with
  // .safetensors, or for a source in torch_dist or zarr; else torch_dist.
  std::string format = {};
  std::string dialect = {};            // "": the source's
  std::vector<std::string> keys = {};  // shell-style patterns of the source's keys; empty: all
  std::string only = {};               // only the part of the tree with this name, which becomes
                                       // the whole: "model". In Megatron-Core's dialect, whose keys
  // do not begin with "model.": all tensors but the optimizer's
  std::vector<RenameRule> rename = {};  // applied after `only`
  // Names a key, as `only` and `rename` have left it; "": it is left out.
  std::function<std::string(const std::string&)> rename_by = nullptr;
  // Converts tensors of float16, bfloat16, float32 and float64; all others keep their dtype.
  std::optional<DType> cast = std::nullopt;
  // "fully_reshardable": the states of Megatron-Core's distributed optimizer that are stored in
  // buckets (dp_reshardable, dp_zero_gather_scatter) become a tensor for each parameter, which
  // loads into any layout, with the same values. "": they are copied as they are.
  std::string optimizer = {};
  // JSON that says where each parameter is in the buckets, made in Python by
  // tilestone.megatron.distributed_optimizer.write_layouts. Implies `optimizer`. "": the layout
  // that the checkpoint holds.
  std::string layout_file = {};
  uint64_t shard_bytes = 0;  // safetensors: the bytes of tensors in one file; 0: one file
  // safetensors, in place of shard_bytes: the file in the folder that gets each key, by its new
  // name, and that of all other keys. "": there must be none.
  std::map<std::string, std::string, std::less<>> files = {};
  std::string other_file = {};
  // Every rank calls, and each writes some of the files of a folder of safetensors; without a
  // dry_run. Default: a group of one.
  Communicator comm = {};
  bool dry_run = false;  // checks and lists everything, but writes nothing
  Reading reading = {};  // of the source
  Checks checks = {};    // of the source
  Resources resources = {};
  double timeout = kNoTimeout;  // seconds
  ProgressFn progress = nullptr;
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};

struct ConvertedKey {
  std::string from;
  std::string to;
  bool object = false;
  DType from_dtype = DType::kFloat32;  // of tensors
  DType dtype = DType::kFloat32;
  Dims shape;
  std::string file;  // safetensors: the file that gets the tensor; otherwise ""
};

struct ConvertResult {
  std::string format;  // of the new checkpoint
  std::string dialect;
  std::vector<ConvertedKey> keys;  // in the order of the new keys
  uint64_t left_out = 0;           // keys of the source that the options leave out
  bool has_common = false;         // Megatron-Core's common state was copied
  uint64_t bytes = 0;              // of the tensors, as written
  double seconds = 0;
};

// Everything is checked before anything is written: Error(kInvalidArgument), naming the key, for a
// tensor or object that the new format can't hold, for two keys with the same new name, and if
// nothing is selected; Error(kUnsupported) for a dtype that can't be converted; Error(kMismatch),
// naming the first parameter that does not fit, for the layout of another model. The new checkpoint
// is then written as by a save on one rank, with the same promise: after a failure or a crash the
// target is absent. An existing target is Error(kAlreadyExists). Memory: resources.buffer_bytes and
// 64 MiB, whatever the size of the checkpoint, and its objects. Each byte is read once.
ConvertResult convert(const Location& source, const Location& target,
                      const ConvertOptions& options = {});

// Compares two checkpoints, of any formats, dialects and layouts.

struct Difference {
  enum class Kind : uint8_t {
    kOnlyInA,
    kOnlyInB,
    kKinds,   // a tensor and an object
    kShapes,  // then the values are not compared
    kDTypes,  // `values` is set if the values differ too
    kValues,  // of tensors with equal dtypes and shapes
    kObjects,
  };
  std::string key;
  Kind kind = Kind::kValues;
  bool values = false;  // the fields of values below are set
  std::string a, b;     // what each has: "float32 [2, 3]", or an object as text
  // Elements whose values differ by more than DiffOptions::atol. NaN equals NaN.
  uint64_t differing = 0;
  uint64_t elements = 0;         // of the tensor
  double max = 0;                // the largest difference; NaN if one of two values is NaN
  double mean = 0;               // of the differences of all elements, without those with NaN
  Dims first;                    // the place of the first differing element
  std::string first_a, first_b;  // its values
};
std::string_view to_string(Difference::Kind kind);  // "only in a", "values", ...

struct DiffOptions {
  // Shell-style patterns of keys as they are in either checkpoint, before `rename_a`; empty: all. A
  // key is compared with its counterpart, whatever that is called. A pattern that matches no key of
  // either checkpoint is an error.
  std::vector<std::string> keys = {};
  std::vector<RenameRule> rename_a = {};  // applied to the keys of `a` before they are compared
  double atol = 0;                        // values that differ by at most this are equal
  Reading reading = {};
  Checks checks = {};
  Resources resources = {};
  ProgressFn progress = nullptr;
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};

struct DiffReport {
  std::vector<Difference> differences;  // by key, in natural order
  uint64_t equal_tensors = 0;
  uint64_t equal_objects = 0;
  uint64_t bytes = 0;  // of tensors that were compared, of both
  double seconds = 0;
  bool same() const { return differences.empty(); }
};

// Reads each checkpoint once. Memory: 128 MiB and the objects. The common states of two checkpoints
// in Megatron-Core's dialect are compared entry by entry, as "common_state.KEY".
// Throws Error(kInvalidArgument) for options that can't be used, and what Checkpoint::open and
// reads throw.
DiffReport diff(const Location& a, const Location& b, const DiffOptions& options = {});

}  // namespace tilestone
