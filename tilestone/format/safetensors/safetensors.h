// safetensors files, folders of them, and Hugging Face's index of such a folder.
// docs/formats/safetensors.md specifies the format.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/dtype.h"
#include "tilestone/format/format.h"

namespace tilestone {

// For reading. Its check() refuses every save: only a conversion writes safetensors.
std::shared_ptr<const Format> safetensors_format();

// A tensor to be written.
struct SafetensorsTensor {
  std::string key;
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;  // safetensors_header_bytes()
};
// At least as many bytes as the tensor adds to the header of its file.
uint64_t safetensors_header_bytes(const std::string& key, DType dtype, const Dims& shape);
// Distributes tensors over files as Hugging Face does: in the given order, into the next file once
// one more tensor would exceed `file_bytes`, or the header's limit. Returns the name of each key's
// file: "model.safetensors" if there is one file, otherwise "model-00001-of-00003.safetensors".
// Error(kInvalidArgument) if the index of these files would exceed its limit.
std::map<std::string, std::string, std::less<>> safetensors_files(
    const std::vector<SafetensorsTensor>& tensors, uint64_t file_bytes);

// Throws Error(kInvalidArgument), naming the key, if safetensors can't hold the tensor: its dtype
// has no name there, or its key is not UTF-8, reserved or too long for a header.
void check_safetensors(const std::string& key, DType dtype, const Dims& shape);

// The place of a piece of a tensor.
struct SafetensorsPiece {
  Dims at;                                   // where its elements begin in the whole tensor
  std::optional<Dims> whole = std::nullopt;  // the tensor's shape, which torch does not record
};
using SafetensorsPieces = std::map<std::string, SafetensorsPiece, std::less<>>;  // by key

// What a writer puts where.
struct SafetensorsPlan {
  std::map<std::string, std::string, std::less<>> files;  // key -> file
  std::string other_file = {};                            // of all other keys; "": there are none
  // The tensors of which this checkpoint has pieces, for the headers. Empty: they are whole, and no
  // header says so.
  SafetensorsPieces pieces = {};
};

// Writes each tensor as a whole into one file, and Hugging Face's index. check() refuses objects
// and parts of tensors. All tensors of a file must be on one rank.
std::shared_ptr<const Format> safetensors_writer(SafetensorsPlan plan);

}  // namespace tilestone
