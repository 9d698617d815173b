// The header of a safetensors file: the length of a JSON text, 8 bytes, little-endian, and the
// text.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/format/safetensors/safetensors.h"
#include "tilestone/geometry/box.h"

namespace tilestone::safetensors {

inline constexpr uint64_t kLengthBytes = 8;
inline constexpr uint64_t kMaxHeader = 100'000'000;  // bytes of the text; the package's limit
inline constexpr size_t kMaxDims = 64;
inline constexpr std::string_view kMetadataKey = "__metadata__";

struct HeaderTensor {
  std::string key;
  DType dtype = DType::kFloat32;
  Dims shape;
  uint64_t begin = 0;  // from the end of the header, bytes
  uint64_t end = 0;
  // Why Tilestone can't read the tensor: "dtype F6_E2M3, shape [4]"; "": it can. Then `dtype` and
  // `shape` are not set.
  std::string unsupported = {};
  // The tensor that they are a piece of; nullopt: not recorded, they are the whole.
  std::optional<SafetensorsPiece> piece = {};
};

// The number of bytes of the JSON text, from the first 8 bytes of a file of `file_size` bytes. All
// functions throw Error(kCorrupt) or Error(kUnsupported), naming `file`, and the key if it is
// known.
uint64_t header_length(ByteView first, uint64_t file_size, const std::string& file);

// The tensors of a file, ordered by their places. Refuses everything that the safetensors package
// refuses, among it gaps, overlaps, and bytes before the first tensor or after the last one; and
// keys that occur twice. A tensor of an unknown dtype is returned as unsupported. `metadata`,
// unless null, gets what "__metadata__" says.
using HeaderTexts = std::map<std::string, std::string, std::less<>>;
std::vector<HeaderTensor> parse_header(ByteView text, uint64_t file_size, const std::string& file,
                                       HeaderTexts* metadata = nullptr);

// The beginning of the text, for messages.
std::string in_quotes(std::string_view text);

// Whether JSON can hold the text: it is UTF-8, without lone surrogates.
bool is_json_text(const std::string& text);

// The header of a file with these tensors, in this order and without gaps. `begin` and `end` are
// ignored. If a tensor has `piece`, all must have it. The text is padded with spaces to a
// multiple of 8 bytes. `metadata`: for "__metadata__". Readers, transformers among them, expect to
// be told there the library whose dtypes these are.
Bytes write_header(const std::vector<HeaderTensor>& tensors,
                   const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

// At least as many bytes as the tensor adds to the text.
uint64_t max_entry_bytes(const HeaderTensor& tensor);
inline constexpr uint64_t kEmptyHeader = 64;  // at least the bytes of the text without tensors

// What PyTorch's HuggingFaceStorageWriter(save_distributed=True) says of the pieces of tensors in a
// file: the text of "DCP_SHARDING_INFO" in the header's "__metadata__".
// {"KEY": {"saved_offsets": [4, 0], "whole_shape": [8, 3]}}, the second one if it is recorded; of
// "" nothing. Throws Error(kCorrupt).
SafetensorsPieces parse_sharding_info(std::string_view text);

}  // namespace tilestone::safetensors
