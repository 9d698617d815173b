#include "tilestone/format/safetensors/sharding_info_internal.h"

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/format/json_value_internal.h"
#include "tilestone/format/safetensors/header_internal.h"

namespace tilestone::safetensors {
namespace {

[[noreturn]] void corrupt_info(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt,
              "safetensors header: " + std::string(kShardingInfoKey) + ": " + problem);
}

const Value::Dict& entries_of(const Value& value) {
  if (value.kind() != Value::Kind::kDict) corrupt_info("an object is missing");
  return value.as_dict();
}

Dims dims_of(const Value& value) {
  if (value.kind() != Value::Kind::kList || value.items().size() > kMaxDims) {
    corrupt_info("a list is missing, or too long");
  }
  std::vector<int64_t> dims;
  for (const Value& dim : value.items()) {
    if (dim.kind() != Value::Kind::kInt || dim.as_int() < 0) corrupt_info("a number is invalid");
    dims.push_back(dim.as_int());
  }
  return Dims(dims);
}

SafetensorsPiece piece_of(const Value& entry) {
  SafetensorsPiece piece;
  if (entries_of(entry).empty() || entry.find(kOffsetsField) == nullptr) {
    corrupt_info("no \"saved_offsets\"");
  }
  for (const auto& [field, value] : entry.as_dict()) {
    if (field.as_string() == kOffsetsField) {
      piece.at = dims_of(value);
    } else if (field.as_string() == kWholeField) {
      piece.whole = dims_of(value);
    } else {
      corrupt_info("the field " + in_quotes(field.as_string()));
    }
  }
  return piece;
}

}  // namespace

SafetensorsPieces parse_sharding_info(std::string_view text) {
  SafetensorsPieces pieces;
  if (text.empty()) return pieces;
  const Value info = value_of_json(text);
  for (const auto& [key, entry] : entries_of(info)) pieces[key.as_string()] = piece_of(entry);
  return pieces;
}

}  // namespace tilestone::safetensors
