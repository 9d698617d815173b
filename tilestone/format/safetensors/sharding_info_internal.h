// What PyTorch's HuggingFaceStorageWriter(save_distributed=True) says of the pieces of tensors in a
// file: the text of "DCP_SHARDING_INFO" in the header's "__metadata__".
#pragma once

#include <string_view>

#include "tilestone/format/safetensors/safetensors.h"

namespace tilestone::safetensors {

inline constexpr std::string_view kShardingInfoKey = "DCP_SHARDING_INFO";

inline constexpr const char* kOffsetsField = "saved_offsets";
inline constexpr const char* kWholeField = "whole_shape";  // Tilestone's, which torch ignores

// {"KEY": {"saved_offsets": [4, 0], "whole_shape": [8, 3]}}, the second one if it is recorded; of
// "" nothing. Throws Error(kCorrupt).
SafetensorsPieces parse_sharding_info(std::string_view text);

}  // namespace tilestone::safetensors
