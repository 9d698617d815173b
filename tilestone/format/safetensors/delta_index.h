// What a delta says of itself in the "__metadata__" of its safetensors file: from which version to
// which it leads, and where the changed elements are. docs/formats/delta.md specifies it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/geometry/box.h"

namespace tilestone {

enum class DeltaKind : uint8_t {
  kSparse,  // positions of the changed elements, and their values
  kXor,     // the XOR with the base, compressed
  kWhole,   // all elements
};
std::string_view to_string(DeltaKind kind);  // "sparse", "xor", "whole"

inline constexpr uint64_t kMaxDeltaPiece = 64u << 20;  // bytes; far more than are written

// A box of a tensor in which elements have changed.
struct DeltaPiece {
  Box box;
  DeltaKind kind = DeltaKind::kWhole;
  uint64_t gap_bytes = 1;  // kSparse: of a number among the positions, 1 or 2
  uint32_t crc32 = 0;      // of the bytes of its entries: positions, then values
  std::string file = {};   // beside the one with the index; "": the same
};

struct DeltaTensor {
  std::string key;
  DType dtype = DType::kFloat32;
  Dims shape;
  // The CRC-32 of its bytes in C order, in the base and in the new version. nullopt: it is not
  // there, or has another dtype or shape. Then all its elements are in pieces.
  std::optional<uint32_t> before = {}, after = {};
  std::vector<DeltaPiece> pieces = {};  // none: the tensor is unchanged, empty, or removed

  bool unchanged() const { return before == after; }
  bool removed() const { return !after; }
  uint64_t bytes() const { return static_cast<uint64_t>(numel(shape)) * itemsize(dtype); }
};

// What the "format" of a file with an index is.
inline constexpr std::string_view kDeltaFormat = "tilestone_delta";

struct DeltaIndex {
  static constexpr int kVersion = 1;
  // state_id() of both versions.
  std::string base = {}, result = {};
  // By key. A tensor whose dtype or shape has changed is there twice: removed, then added.
  std::vector<DeltaTensor> tensors = {};
};

// A tensor of a version.
struct TensorSum {
  std::string key;
  DType dtype = DType::kFloat32;
  Dims shape;
  uint32_t crc32 = 0;
};
// The same for versions with the same keys, dtypes, shapes and CRC-32s: 64 hex digits, the SHA-256
// of a line for each tensor. Sorts `tensors`.
std::string state_id(std::vector<TensorSum> tensors);
std::vector<TensorSum> sums_after(const DeltaIndex& index);
// The index of a delta with these tensors, in any order.
DeltaIndex make_index(std::vector<DeltaTensor> tensors);

// The safetensors keys of a piece's entries begin with it.
std::string delta_entry(const DeltaTensor& tensor, const DeltaPiece& piece);
inline constexpr std::string_view kDeltaPositions = ".positions";
inline constexpr std::string_view kDeltaValues = ".values";
inline constexpr std::string_view kDeltaXor = ".xor";

// The tensors of the file.
using DeltaEntries = std::vector<safetensors::HeaderTensor>;
// The beginning of a safetensors file with these entries, one after the other, and, unless null,
// the index. Throws Error(kInvalidArgument), naming the key, for a key that is not UTF-8 or if two
// entries have the same one.
Bytes write_delta_header(const DeltaEntries& entries, const DeltaIndex* index);

struct DeltaHeader {
  // By key; `begin` and `end` are counted from the beginning of the file.
  std::map<std::string, safetensors::HeaderTensor, std::less<>> entries;
  std::optional<DeltaIndex> index;  // nullopt: an ordinary safetensors file
};
// Throws Error(kCorrupt), or kUnsupported for an index of a later version, naming `file`.
DeltaHeader parse_delta_header(ByteView text, uint64_t file_size, const std::string& file);

}  // namespace tilestone
