// What the ranks of a delta tell one another of the boxes that they hold.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/format/safetensors/delta_index.h"

namespace tilestone::engine {

// A box of a tensor on one rank.
struct ShardSum {
  std::string key;
  DType dtype = DType::kFloat32;
  Dims shape;  // of the tensor
  Box box;
  bool has_base = false;
  uint32_t before = 0, after = 0;  // portions of the tensor's CRC-32
  std::vector<DeltaPiece> pieces = {};

  uint64_t bytes() const { return static_cast<uint64_t>(box.numel()) * itemsize(dtype); }
};
Bytes encode_sums(std::span<const ShardSum> sums);
std::vector<ShardSum> decode_sums(ByteView bytes, int rank);

// A tensor, from the sums of all ranks: replicas count once.
struct SummedTensor {
  DType dtype = DType::kFloat32;
  Dims shape;
  // The portion, and the first rank that has it.
  std::map<Box, std::pair<uint32_t, int>> boxes = {};
  uint64_t covered = 0;  // elements
  uint32_t before = 0;   // the XOR of the portions in the base
  bool has_base = true;  // of all its boxes
  std::vector<DeltaPiece> pieces = {};

  uint32_t crc32() const;
};
using SummedTensors = std::map<std::string, SummedTensor, std::less<>>;
// Adds the sums `after` of a rank. Error(kMismatch), naming the key, if dtype, shape or a replica
// differ.
void add_sums(SummedTensors& tensors, std::span<const ShardSum> sums, int rank);
// Error(kCoverage) if the boxes of a tensor are not all its elements once.
void expect_covered(const SummedTensors& tensors);

}  // namespace tilestone::engine
