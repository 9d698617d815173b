#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/json_value_internal.h"
#include "tilestone/format/safetensors/dtype_names_internal.h"
#include "tilestone/format/safetensors/header_internal.h"

namespace tilestone::safetensors {
namespace {

using Json = nlohmann::json;

const std::string kShardingInfoKey = "DCP_SHARDING_INFO";
constexpr const char* kOffsetsField = "saved_offsets";
constexpr const char* kWholeField = "whole_shape";  // Tilestone's, which torch ignores

[[noreturn]] void corrupt_header(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "safetensors header: " + problem);
}

// What a header says about one tensor. Its numbers are not checked yet.
struct Entry {
  std::string key;
  std::optional<std::string> dtype;
  std::optional<std::vector<uint64_t>> shape;
  std::optional<std::vector<uint64_t>> offsets;
};

// Reads the JSON text as it is parsed, so that memory is bounded by the text's size, and no depth
// of nesting needs a stack.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  std::vector<Entry> take() && { return std::move(entries_); }
  const std::string& sharding_info() const { return sharding_info_; }  // "": there is none

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a bool"); }
  bool number_integer(number_integer_t) override { unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { unexpected("a float"); }
  bool binary(binary_t&) override { unexpected("bytes"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (array_ == nullptr) unexpected("a number");
    if (array_->size() == kMaxDims) corrupt_header("a list of " + level() + " is too long");
    array_->push_back(value);
    return true;
  }

  bool string(string_t& text) override {
    if (level_ == Level::kMetadata) {
      if (field_ == kShardingInfoKey) sharding_info_ = std::move(text);
      return true;
    }
    if (level_ != Level::kTensor || array_ != nullptr || field_ != "dtype") unexpected("a string");
    entries_.back().dtype = std::move(text);
    return true;
  }

  bool start_object(std::size_t) override {
    if (level_ == Level::kStart) {
      level_ = Level::kTop;
    } else if (level_ == Level::kTop) {
      level_ = field_ == kMetadataKey ? Level::kMetadata : Level::kTensor;
      if (level_ == Level::kTensor)
        entries_.push_back({.key = field_, .dtype = {}, .shape = {}, .offsets = {}});
      fields_.clear();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    level_ = level_ == Level::kTop ? Level::kEnd : Level::kTop;
    return true;
  }

  bool key(string_t& name) override {
    auto& known = level_ == Level::kTop ? keys_ : fields_;
    if (!known.insert(name).second) corrupt_header(in_quotes(name) + " occurs twice");
    field_ = std::move(name);
    if (level_ == Level::kTensor && field_ != "dtype" && field_ != "shape" &&
        field_ != "data_offsets") {
      corrupt_header("unknown field " + in_quotes(field_) + " of " + level());
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (level_ != Level::kTensor || array_ != nullptr || field_ == "dtype") unexpected("a list");
    auto& list = field_ == "shape" ? entries_.back().shape : entries_.back().offsets;
    array_ = &list.emplace();
    return true;
  }

  bool end_array() override {
    array_ = nullptr;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    corrupt_header("invalid JSON at byte " + std::to_string(position));
  }

 private:
  enum class Level : uint8_t { kStart, kTop, kMetadata, kTensor, kEnd };

  std::string level() const {
    switch (level_) {
      case Level::kTensor:
        return "the tensor " + in_quotes(entries_.back().key);
      case Level::kMetadata:
        return std::string(kMetadataKey);
      default:
        return "the header";
    }
  }
  [[noreturn]] void unexpected(const std::string& what) const {
    corrupt_header(what + " in " + level() + (field_.empty() ? "" : " at " + in_quotes(field_)));
  }

  Level level_ = Level::kStart;
  std::string field_;  // the latest key
  std::vector<uint64_t>* array_ = nullptr;
  std::vector<Entry> entries_;
  std::string sharding_info_;
  std::unordered_set<std::string> keys_;
  std::unordered_set<std::string> fields_;
};

Dims shape_of(const Entry& entry) {
  Dims shape;
  for (const uint64_t extent : *entry.shape) {
    if (extent > INT64_MAX) corrupt_header("an extent is too large");
    shape.push_back(static_cast<int64_t>(extent));
  }
  return shape;
}

// Takes the entry's key if it succeeds.
HeaderTensor tensor_of(Entry& entry) {
  for (const auto& [name, given] :
       {std::pair("dtype", entry.dtype.has_value()), std::pair("shape", entry.shape.has_value()),
        std::pair("data_offsets", entry.offsets.has_value())}) {
    if (!given) corrupt_header(in_quotes(name) + " is missing");
  }
  if (entry.offsets->size() != 2) corrupt_header("\"data_offsets\" must have two numbers");
  HeaderTensor tensor{.key = {},
                      .shape = shape_of(entry),
                      .begin = (*entry.offsets)[0],
                      .end = (*entry.offsets)[1]};
  const auto named = dtype_named(*entry.dtype);
  const bool odd = named && named->packed > 1 &&
                   (tensor.shape.empty() || tensor.shape.back() % named->packed != 0);
  if (!named || odd) {
    if (tensor.begin > tensor.end) corrupt_header("\"data_offsets\" are not ordered");
    tensor.unsupported = "dtype " + entry.dtype->substr(0, 40) + ", shape " +
                         to_string(tensor.shape) + (odd ? ", whose last dim is not even" : "");
    tensor.key = std::move(entry.key);
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
    corrupt_header("a tensor of " + *entry.dtype + " of shape " + to_string(tensor.shape) +
                   " has " + std::to_string(size) + " bytes, but its data_offsets are " +
                   std::to_string(tensor.begin) + " and " + std::to_string(tensor.end));
  }
  tensor.key = std::move(entry.key);
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

std::vector<HeaderTensor> parse(ByteView text, uint64_t file_size) {
  // The package refuses anything else before the object, spaces too.
  if (text.empty() || text[0] != std::byte{'{'}) corrupt_header("it does not begin with {");
  HeaderReader reader;
  const std::string_view chars = as_text(text);
  // The parser takes it for the end of the text.
  if (chars.find('\0') != std::string_view::npos) corrupt_header("invalid JSON: a NUL byte");
  Json::sax_parse(chars.begin(), chars.end(), &reader);
  std::vector<HeaderTensor> tensors;
  std::vector<Entry> entries = std::move(reader).take();
  tensors.reserve(entries.size());
  const SafetensorsPieces pieces = parse_sharding_info(reader.sharding_info());
  for (Entry& entry : entries) {
    with_key(std::string(entry.key), [&] {
      tensors.push_back(tensor_of(entry));
      const auto piece = pieces.find(tensors.back().key);
      if (piece == pieces.end()) return;
      const size_t dims = tensors.back().shape.size();
      if (piece->second.at.size() != dims ||
          piece->second.whole.value_or(tensors.back().shape).size() != dims) {
        corrupt_header(kShardingInfoKey + " and \"shape\" have other numbers of dims");
      }
      tensors.back().piece = piece->second;
    });
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const HeaderTensor& a, const HeaderTensor& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  check_ranges(tensors, file_size - kLengthBytes - text.size());
  return tensors;
}

const Value::Dict& entries_of(const Value& value) {
  if (value.kind() != Value::Kind::kDict)
    corrupt_header(kShardingInfoKey + ": an object is missing");
  return value.as_dict();
}

Dims dims_of(const Value& value) {
  if (value.kind() != Value::Kind::kList || value.items().size() > kMaxDims) {
    corrupt_header(kShardingInfoKey + ": a list is missing, or too long");
  }
  std::vector<int64_t> dims;
  for (const Value& dim : value.items()) {
    if (dim.kind() != Value::Kind::kInt || dim.as_int() < 0) {
      corrupt_header(kShardingInfoKey + ": a number is invalid");
    }
    dims.push_back(dim.as_int());
  }
  return Dims(dims);
}

SafetensorsPiece piece_of(const Value& entry) {
  SafetensorsPiece piece;
  if (entries_of(entry).empty() || entry.find(kOffsetsField) == nullptr) {
    corrupt_header(kShardingInfoKey + ": no \"saved_offsets\"");
  }
  for (const auto& [field, value] : entry.as_dict()) {
    if (field.as_string() == kOffsetsField) {
      piece.at = dims_of(value);
    } else if (field.as_string() == kWholeField) {
      piece.whole = dims_of(value);
    } else {
      corrupt_header(kShardingInfoKey + ": the field " + in_quotes(field.as_string()));
    }
  }
  return piece;
}

}  // namespace

SafetensorsPieces parse_sharding_info(std::string_view text) {
  SafetensorsPieces pieces;
  if (text.empty()) return pieces;
  const Value info = value_of_json(text, kShardingInfoKey);
  for (const auto& [key, entry] : entries_of(info)) pieces[key.as_string()] = piece_of(entry);
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

std::vector<HeaderTensor> parse_header(ByteView text, uint64_t file_size, const std::string& file) {
  return with_file(file, [&] { return parse(text, file_size); });
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
