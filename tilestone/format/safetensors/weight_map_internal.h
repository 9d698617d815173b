// Hugging Face's index of a folder of safetensors files, "model.safetensors.index.json": which file
// has each tensor.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "tilestone/base/bytes.h"

namespace tilestone::safetensors {

using WeightMap = std::map<std::string, std::string, std::less<>>;  // key -> file

inline constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
inline constexpr std::string_view kIndexName = "model.safetensors.index.json";
inline constexpr std::string_view kFileSuffix = ".safetensors";
inline constexpr std::string_view kOnlyFile = "model.safetensors";
// As PyTorch's HuggingFaceStorageWriter names a rank's file: "shard-00001-model-...".
inline bool is_shard_name(std::string_view name) {
  return name.starts_with("shard-") && name.ends_with(kFileSuffix) &&
         name.find('/') == std::string_view::npos;
}

// Throws Error(kCorrupt), naming `file`; kUnsafe for a file name that leaves the folder.
WeightMap parse_weight_map(ByteView text, const std::string& file);

// Error(kInvalidArgument) if parse_weight_map() would refuse the index of these files as too long.
void expect_index_fits(const WeightMap& map);

// As Hugging Face writes it: an indent of 2, sorted names. `bytes`: of all tensors.
Bytes write_weight_map(const WeightMap& map, uint64_t bytes);

}  // namespace tilestone::safetensors
