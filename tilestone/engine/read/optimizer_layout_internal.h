// Where a distributed optimizer of Megatron-Core has each parameter in its flat buffers. The Python
// package makes such layouts (tilestone.megatron.distributed_optimizer.Layout), and stores them in
// checkpoints and in files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/geometry/box.h"
#include "tilestone/state/value.h"

namespace tilestone::engine {

// A box of a tensor of the model. Element (i, j, ...) of the box is element
// start + i * strides[0] + j * strides[1] + ... of the flattened parameter.
struct LayoutPiece {
  std::string key;
  Dims global_shape;
  Box box;
  Dims strides;
  int64_t start = 0;
};

struct LayoutParameter {
  std::string key;
  int64_t numel = 0;
  int64_t start = 0;  // in its bucket
  std::vector<LayoutPiece> pieces;
  int64_t end() const { return start + numel; }
};

struct LayoutBucket {
  int64_t numel = 0;  // without the padding at the end
  std::vector<LayoutParameter> parameters;
};

struct LayoutBuffer {
  Value dtypes;            // a tuple: of the parameters, of their gradients
  std::string dtype_text;  // "(torch.bfloat16, torch.float32)", as keys have it
  std::vector<LayoutBucket> buckets;
  int64_t numel() const;  // of all buckets, without padding
};

// The buffers of one model-parallel rank.
struct OptimizerLayout {
  int64_t group = 0;             // Megatron-Core's data_parallel_group_idx
  std::optional<int64_t> chain;  // number of the optimizer in a chain of several
  std::vector<LayoutBuffer> buffers;

  std::string prefix() const;  // of the keys: "chained_0.optimizer.distributed.dp_group_idx_0"
  std::string bucket_key(size_t buffer, size_t bucket) const;  // ".STATE" follows
};

// Everything is checked: sizes, bounds, and that parameters do not overlap. Error(kMismatch) for
// anything else than a layout.
OptimizerLayout optimizer_layout_of(const Value& plain);
// The layouts in JSON, as write_layouts() in Python writes them to a file. Also throws
// Error(kCorrupt).
std::vector<OptimizerLayout> parse_optimizer_layouts(std::string_view json);
// Those in such a file; "": none. Errors name the file.
std::vector<OptimizerLayout> optimizer_layouts_in(const std::string& path);

}  // namespace tilestone::engine
