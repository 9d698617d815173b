// What PyTorch's HuggingFaceStorageWriter(save_distributed=True) says of the pieces of tensors in a
// file: the text of "DCP_SHARDING_INFO" in the header's "__metadata__".
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "tilestone/geometry/box.h"

namespace tilestone::safetensors {

inline constexpr std::string_view kShardingInfoKey = "DCP_SHARDING_INFO";

// Where each key's elements begin in the whole tensor. The extents of whole tensors are in no file:
// they are what the pieces of all files cover.
using ShardingInfo = std::map<std::string, Dims, std::less<>>;

// {"KEY": {"saved_offsets": [4, 0]}}; of "" nothing. Throws Error(kCorrupt).
ShardingInfo parse_sharding_info(std::string_view text);

}  // namespace tilestone::safetensors
