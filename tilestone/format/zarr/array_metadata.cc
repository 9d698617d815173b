#include <algorithm>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/strict_json_internal.h"
#include "tilestone/format/zarr/array_metadata_internal.h"
#include "tilestone/format/zarr/dtype_names_internal.h"

namespace tilestone::zarr {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxDims = 64;       // numpy's limit
constexpr size_t kMaxText = 1 << 20;  // bytes

[[noreturn]] void corrupt(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "array description: " + problem);
}

[[noreturn]] void unsupported(const std::string& problem) {
  throw Error(ErrorCode::kUnsupported, "array description: " + problem);
}

Json parse_object(ByteView text) {
  if (text.size() > kMaxText) {
    corrupt("it has " + std::to_string(text.size()) + " bytes; the limit is " +
            std::to_string(kMaxText));
  }
  Json json = strict_json(as_text(text), "array description");
  if (!json.is_object()) corrupt("it is not a JSON object");
  return json;
}

const Json& field(const Json& json, const char* name) {
  const auto found = json.find(name);
  if (found == json.end()) corrupt("\"" + std::string(name) + "\" is missing");
  return *found;
}

int64_t whole_number(const Json& json, const std::string& what) {
  if (!json.is_number_unsigned() || json.get<uint64_t>() > INT64_MAX) {
    corrupt(what + " is not an integer from 0 to 2^63 - 1");
  }
  return static_cast<int64_t>(json.get<uint64_t>());
}

Dims dims(const Json& json, const char* name) {
  if (!json.is_array()) corrupt("\"" + std::string(name) + "\" is not a list");
  if (json.size() > kMaxDims) {
    corrupt("\"" + std::string(name) + "\" has " + std::to_string(json.size()) + " dims; at most " +
            std::to_string(kMaxDims) + " are possible");
  }
  Dims found;
  for (const Json& extent : json) {
    found.push_back(whole_number(extent, "an extent in \"" + std::string(name) + "\""));
  }
  return found;
}

DType dtype(const Json& json) {
  if (json.is_array()) unsupported("structured dtypes are not supported");
  if (!json.is_string()) corrupt("\"dtype\" is not a string");
  return dtype_named(json.get_ref<const std::string&>());
}

void check_bytes(const Dims& shape, DType dtype, const char* what) {
  std::optional<int64_t> bytes = static_cast<int64_t>(itemsize(dtype));
  for (const int64_t extent : shape) {
    // The other dims must not overflow even if one dim is 0, because strides are their products.
    if (bytes) bytes = try_mul(*bytes, std::max<int64_t>(extent, 1));
  }
  if (!bytes) corrupt(std::string(what) + " with shape " + to_string(shape) + " is too large");
}

// In a dim of size 0, the chunks may have size 0 too: zarr 3 writes this.
void read_shapes(const Json& json, ArrayMetadata& array) {
  array.shape = dims(field(json, "shape"), "shape");
  array.chunk_shape = dims(field(json, "chunks"), "chunks");
  if (array.chunk_shape.size() != array.shape.size()) {
    corrupt("shape " + to_string(array.shape) + " and chunks " + to_string(array.chunk_shape) +
            " differ in their number of dims");
  }
  for (size_t d = 0; d < array.shape.size(); ++d) {
    int64_t& extent = array.chunk_shape[d];
    if (extent == 0 && array.shape[d] == 0) extent = 1;
    if (extent == 0) corrupt("chunks " + to_string(array.chunk_shape) + " hold no elements");
  }
  check_bytes(array.shape, array.dtype, "a tensor");
  check_bytes(array.chunk_shape, array.dtype, "a chunk");
}

void refuse_codecs(const Json& json) {
  const Json& compressor = field(json, "compressor");
  if (!compressor.is_null()) {
    const bool named = compressor.is_object() && compressor.contains("id") &&
                       compressor["id"].is_string() && compressor["id"].size() < 40;
    unsupported("the chunks are compressed" +
                (named ? " with " + compressor["id"].get<std::string>() : std::string()));
  }
  const Json& filters = field(json, "filters");
  if (!filters.is_null() && !(filters.is_array() && filters.empty())) {
    unsupported("the chunks are filtered");
  }
}

bool is_fortran(const Json& json) {
  if (json == "F") return true;
  if (json != "C") corrupt("\"order\" is neither \"C\" nor \"F\"");
  return false;
}

char separator(const Json& json) {
  const auto found = json.find("dimension_separator");
  if (found == json.end() || *found == ".") return '.';
  if (*found != "/") corrupt("\"dimension_separator\" is neither \".\" nor \"/\"");
  return '/';
}

ArrayMetadata read(const Json& json) {
  if (const int64_t version = whole_number(field(json, "zarr_format"), "\"zarr_format\"");
      version != 2) {
    unsupported("zarr version " + std::to_string(version) + " is not supported, only version 2");
  }
  ArrayMetadata array;
  array.dtype = dtype(field(json, "dtype"));
  read_shapes(json, array);
  refuse_codecs(json);
  field(json, "fill_value");  // required but not used: missing chunks are not filled
  array.fortran = is_fortran(field(json, "order"));
  array.separator = separator(json);
  return array;
}

}  // namespace

uint64_t ArrayMetadata::chunk_bytes() const {
  return static_cast<uint64_t>(numel(chunk_shape)) * itemsize(dtype);
}

Dims ArrayMetadata::chunk_strides() const {
  if (!fortran) return contiguous_strides(chunk_shape);
  Dims strides(chunk_shape.size(), 1);
  for (size_t d = 1; d < strides.size(); ++d) strides[d] = strides[d - 1] * chunk_shape[d - 1];
  return strides;
}

ArrayMetadata parse_array(ByteView text, const std::string& file) {
  return with_file(file, [&] { return read(parse_object(text)); });
}

Bytes write_array(const ArrayMetadata& array) {
  const auto name = name_of(array.dtype);
  if (!name) {
    throw Error(ErrorCode::kInternal,
                "zarr has no name for dtype " + std::string(to_string(array.dtype)));
  }
  Json json{{"chunks", std::vector<int64_t>(array.chunk_shape.begin(), array.chunk_shape.end())},
            {"compressor", nullptr},
            {"dtype", *name},
            {"fill_value", nullptr},
            {"filters", nullptr},
            {"order", array.fortran ? "F" : "C"},
            {"shape", std::vector<int64_t>(array.shape.begin(), array.shape.end())},
            {"zarr_format", 2}};
  if (array.separator != '.') json["dimension_separator"] = std::string(1, array.separator);
  return to_bytes(json.dump(4));
}

}  // namespace tilestone::zarr
