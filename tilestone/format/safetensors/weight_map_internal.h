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

// Throws Error(kCorrupt), naming `file`; kUnsafe for a file name that leaves the folder.
WeightMap parse_weight_map(ByteView text, const std::string& file);

// As Hugging Face writes it: an indent of 2, sorted names. `bytes`: of all tensors.
Bytes write_weight_map(const WeightMap& map, uint64_t bytes);

}  // namespace tilestone::safetensors
