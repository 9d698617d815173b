#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/safetensors/dtype_names_internal.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/strict_json_internal.h"

namespace tilestone::safetensors {
namespace {

using Json = nlohmann::json;

const std::string kShardingInfoKey = "DCP_SHARDING_INFO";
constexpr const char* kOffsetsField = "saved_offsets";
constexpr const char* kWholeField = "whole_shape";  // Tilestone's, which torch ignores

[[noreturn]] void corrupt_header(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "safetensors header: " + problem);
}

// A field of an object, which must be there.
const Json& field_of(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) corrupt_header(in_quotes(name) + " is missing");
  return *found;
}

// Sizes or offsets.
std::vector<uint64_t> numbers_of(const Json& object, const char* name) {
  const Json& list = field_of(object, name);
  if (!list.is_array() || list.size() > kMaxDims) {
    corrupt_header(in_quotes(name) + " is no list, or too long");
  }
  std::vector<uint64_t> numbers;
  for (const Json& number : list) {
    if (!number.is_number_unsigned())
      corrupt_header("a number in " + in_quotes(name) + " is invalid");
    numbers.push_back(number.get<uint64_t>());
  }
  return numbers;
}

Dims dims_of(const Json& object, const char* name) {
  Dims dims;
  for (const uint64_t dim : numbers_of(object, name)) {
    if (dim > INT64_MAX) corrupt_header("a number in " + in_quotes(name) + " is too large");
    dims.push_back(static_cast<int64_t>(dim));
  }
  return dims;
}

void expect_fields(const Json& object, std::initializer_list<std::string_view> known) {
  if (!object.is_object()) corrupt_header("an object is missing");
  for (const auto& [name, value] : object.items()) {
    if (std::ranges::find(known, name) == known.end()) {
      corrupt_header("unknown field " + in_quotes(name));
    }
  }
}

HeaderTensor tensor_of(const std::string& key, const Json& entry) {
  expect_fields(entry, {"dtype", "shape", "data_offsets"});
  const Json& dtype = field_of(entry, "dtype");
  if (!dtype.is_string()) corrupt_header("\"dtype\" is no text");
  HeaderTensor tensor{.key = key, .shape = dims_of(entry, "shape")};
  const std::vector<uint64_t> offsets = numbers_of(entry, "data_offsets");
  if (offsets.size() != 2) corrupt_header("\"data_offsets\" must have two numbers");
  tensor.begin = offsets[0];
  tensor.end = offsets[1];
  const auto& name = dtype.get_ref<const std::string&>();
  const auto named = dtype_named(name);
  const bool odd = named && named->packed > 1 &&
                   (tensor.shape.empty() || tensor.shape.back() % named->packed != 0);
  if (!named || odd) {
    if (tensor.begin > tensor.end) corrupt_header("\"data_offsets\" are not ordered");
    tensor.unsupported = "dtype " + name.substr(0, 40) + ", shape " + to_string(tensor.shape) +
                         (odd ? ", whose last dim is not even" : "");
    return tensor;
  }
  tensor.dtype = named->dtype;
  if (named->packed > 1) tensor.shape[tensor.shape.size() - 1] /= named->packed;
  std::optional<uint64_t> bytes = itemsize(tensor.dtype);
  for (const int64_t extent : tensor.shape) {
    // The other dims must not overflow even if one dim is 0, because strides are their products.
    if (bytes)
      bytes = try_mul<uint64_t>(*bytes, static_cast<uint64_t>(std::max<int64_t>(extent, 1)));
  }
  if (!bytes || *bytes > INT64_MAX)
    corrupt_header("shape " + to_string(tensor.shape) + " is too large");
  const uint64_t size = static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
  if (tensor.begin > tensor.end || tensor.end - tensor.begin != size) {
    corrupt_header("a tensor of " + name + " of shape " + to_string(tensor.shape) + " has " +
                   std::to_string(size) + " bytes, but its data_offsets are " +
                   std::to_string(tensor.begin) + " and " + std::to_string(tensor.end));
  }
  return tensor;
}

// The tensors must fill the bytes after the header exactly.
void check_ranges(const std::vector<HeaderTensor>& tensors, uint64_t data_bytes) {
  uint64_t end = 0;
  for (const HeaderTensor& tensor : tensors) {
    if (tensor.begin != end) {
      throw Error(ErrorCode::kCorrupt,
                  "safetensors header: the tensor begins at " + std::to_string(tensor.begin) +
                      (tensor.begin < end ? ", inside the one before it, which ends at "
                                          : ", but the one before it ends at ") +
                      std::to_string(end))
          .with_key(tensor.key);
    }
    end = tensor.end;
  }
  if (end == data_bytes) return;
  corrupt_header("the tensors have " + std::to_string(end) + " bytes, but the file has " +
                 std::to_string(data_bytes) + " bytes after its header");
}

HeaderTexts texts_of(const Json& metadata) {
  if (!metadata.is_object()) corrupt_header("an object is missing");
  HeaderTexts texts;
  for (const auto& [name, text] : metadata.items()) {
    if (!text.is_string()) corrupt_header("no text at " + in_quotes(name));
    texts[name] = text.get<std::string>();
  }
  return texts;
}

std::vector<HeaderTensor> parse(ByteView text, uint64_t file_size, HeaderTexts& metadata) {
  // The package refuses anything else before the object, spaces too.
  if (text.empty() || text[0] != std::byte{'{'}) corrupt_header("it does not begin with {");
  const Json header = strict_json(as_text(text), "safetensors header");
  const auto found = header.find(kMetadataKey);
  if (found != header.end()) {
    metadata = with_key(kMetadataKey, [&] { return texts_of(*found); });
  }
  const auto info = metadata.find(kShardingInfoKey);
  const SafetensorsPieces pieces =
      parse_sharding_info(info == metadata.end() ? std::string_view() : info->second);
  std::vector<HeaderTensor> tensors;
  for (const auto& [key, entry] : header.items()) {
    if (key == kMetadataKey) continue;
    with_key(key, [&] {
      HeaderTensor& tensor = tensors.emplace_back(tensor_of(key, entry));
      const auto piece = pieces.find(key);
      if (piece == pieces.end()) return;
      const size_t dims = tensor.shape.size();
      if (piece->second.at.size() != dims ||
          piece->second.whole.value_or(tensor.shape).size() != dims) {
        corrupt_header(kShardingInfoKey + " and \"shape\" have other numbers of dims");
      }
      tensor.piece = piece->second;
    });
  }
  std::ranges::stable_sort(
      tensors, {}, [](const HeaderTensor& tensor) { return std::pair(tensor.begin, tensor.end); });
  check_ranges(tensors, file_size - kLengthBytes - text.size());
  return tensors;
}

}  // namespace

SafetensorsPieces parse_sharding_info(std::string_view text) {
  SafetensorsPieces pieces;
  if (text.empty()) return pieces;
  const Json info = strict_json(text, kShardingInfoKey);
  if (!info.is_object()) corrupt_header(kShardingInfoKey + " is no object");
  for (const auto& [key, entry] : info.items()) {
    SafetensorsPiece& piece = pieces[key];
    expect_fields(entry, {kOffsetsField, kWholeField});
    piece.at = dims_of(entry, kOffsetsField);
    if (entry.contains(kWholeField)) piece.whole = dims_of(entry, kWholeField);
  }
  return pieces;
}

std::string in_quotes(std::string_view text) {
  return "\"" + std::string(text.substr(0, 60)) + "\"";
}

uint64_t header_length(ByteView first, uint64_t file_size, const std::string& file) {
  uint64_t length = 0;
  if (first.size() == kLengthBytes) std::memcpy(&length, first.data(), sizeof length);
  with_file(file, [&] {
    if (first.size() != kLengthBytes) {
      corrupt_header("the file has " + std::to_string(file_size) + " bytes, too few for a header");
    }
    if (as_text(first) == "version ") {  // the beginning of such a file; no header is as long
      throw Error(ErrorCode::kCorrupt, "this is a pointer of Git LFS, not the file itself")
          .with_hint("fetch the files with `git lfs pull`");
    }
    if (length > kMaxHeader) {
      corrupt_header("its length is " + std::to_string(length) + " bytes; the limit is " +
                     std::to_string(kMaxHeader));
    }
    if (length > file_size - kLengthBytes) {
      corrupt_header("its length is " + std::to_string(length) + " bytes, but the file has only " +
                     std::to_string(file_size));
    }
  });
  return length;
}

std::vector<HeaderTensor> parse_header(ByteView text, uint64_t file_size, const std::string& file,
                                       HeaderTexts* metadata) {
  HeaderTexts texts;
  auto tensors = with_file(file, [&] { return parse(text, file_size, texts); });
  if (metadata != nullptr) *metadata = std::move(texts);
  return tensors;
}

bool is_json_text(const std::string& text) {
  try {
    static_cast<void>(Json(text).dump());
    return true;
  } catch (const Json::type_error&) {
    return false;
  }
}

namespace {

std::string entry_text(const HeaderTensor& tensor, uint64_t begin, uint64_t end) {
  Dims shape = tensor.shape;
  if (!shape.empty()) shape[shape.size() - 1] *= dtype_named(*name_of(tensor.dtype))->packed;
  return "," + Json(tensor.key).dump() + R"(:{"dtype":")" + std::string(*name_of(tensor.dtype)) +
         R"(","shape":)" + Json(std::vector<int64_t>(shape.begin(), shape.end())).dump() +
         R"(,"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

std::vector<int64_t> list_of(const Dims& dims) { return {dims.begin(), dims.end()}; }

// What PyTorch's writer says of the file: in "__metadata__", after a comma.
std::string pieces_text(const std::vector<HeaderTensor>& tensors) {
  Json info = Json::object();
  for (const HeaderTensor& tensor : tensors) {
    if (!tensor.piece) continue;
    Json& entry = info[tensor.key];
    entry[kOffsetsField] = list_of(tensor.piece->at);
    if (tensor.piece->whole) entry[kWholeField] = list_of(*tensor.piece->whole);
  }
  if (info.empty()) return "";
  return ",\"" + kShardingInfoKey + "\":" + Json(info.dump()).dump() + R"(,"DCP_VERSION":"1.0")";
}

}  // namespace

uint64_t max_entry_bytes(const HeaderTensor& tensor) {
  return entry_text(tensor, UINT64_MAX, UINT64_MAX).size();
}

Bytes write_header(const std::vector<HeaderTensor>& tensors,
                   const std::map<std::string, std::string>& metadata) {
  std::string text = R"({"__metadata__":)" + Json(metadata).dump();
  text.insert(text.size() - 1, pieces_text(tensors));
  uint64_t begin = 0;
  for (const HeaderTensor& tensor : tensors) {
    const uint64_t end =
        begin + static_cast<uint64_t>(numel(tensor.shape)) * itemsize(tensor.dtype);
    text += entry_text(tensor, begin, end);
    begin = end;
  }
  text += '}';
  text.resize(align_up(text.size(), kLengthBytes), ' ');
  const uint64_t length = text.size();
  Bytes bytes(kLengthBytes + length);
  std::memcpy(bytes.data(), &length, sizeof length);
  std::memcpy(bytes.data() + kLengthBytes, text.data(), length);
  return bytes;
}

}  // namespace tilestone::safetensors
