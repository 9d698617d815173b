#include "tilestone/format/safetensors/delta_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/file_name.h"
#include "tilestone/base/sha256.h"
#include "tilestone/format/safetensors/dtype_names_internal.h"
#include "tilestone/format/safetensors/safetensors.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone {
namespace {

using Json = nlohmann::json;

constexpr std::array kKinds = {DeltaKind::kSparse, DeltaKind::kXor, DeltaKind::kWhole};

[[noreturn]] void corrupt_delta(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "index of a delta: " + problem);
}

std::string hex(uint32_t crc) { return fmt::format("{:08x}", crc); }

uint32_t parse_hex(const std::string& text) {
  uint32_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value, 16);
  if (text.size() != 8 || stop != end || error != std::errc()) {
    corrupt_delta("a CRC-32 is " + safetensors::in_quotes(text));
  }
  return value;
}

Json json_of(const Dims& dims) { return std::vector<int64_t>(dims.begin(), dims.end()); }

Dims dims_of(const Json& json) {
  const auto values = json.get<std::vector<int64_t>>();
  if (values.size() > safetensors::kMaxDims) corrupt_delta("a shape has too many dims");
  return Dims(std::span<const int64_t>(values));
}

Json json_of(const DeltaPiece& piece) {
  Json json = {{"offset", json_of(piece.box.offset)},
               {"shape", json_of(piece.box.shape)},
               {"kind", to_string(piece.kind)},
               {"crc32", hex(piece.crc32)}};
  if (piece.kind == DeltaKind::kSparse) json["gap_bytes"] = piece.gap_bytes;
  if (!piece.file.empty()) json["file"] = piece.file;
  return json;
}

DeltaPiece piece_of(const Json& json, const Dims& shape, DType dtype) {
  DeltaPiece piece;
  piece.box = {dims_of(json.at("offset")), dims_of(json.at("shape"))};
  check_bounds(piece.box, shape);
  if (static_cast<uint64_t>(piece.box.numel()) > kMaxDeltaPiece / itemsize(dtype)) {
    corrupt_delta("a piece has more than 64 MiB");
  }
  const auto kind = json.at("kind").get<std::string>();
  const auto found = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](DeltaKind each) { return to_string(each) == kind; });
  if (found == kKinds.end())
    corrupt_delta("a piece is of the kind " + safetensors::in_quotes(kind));
  piece.kind = *found;
  piece.gap_bytes = json.value("gap_bytes", uint64_t{1});
  if (piece.gap_bytes != 1 && piece.gap_bytes != 2) corrupt_delta("gap_bytes is neither 1 nor 2");
  piece.crc32 = parse_hex(json.at("crc32").get<std::string>());
  piece.file = json.value("file", std::string());
  if (!piece.file.empty()) {
    check_file_name(piece.file);
    if (piece.file.find('/') != std::string::npos) {
      throw Error(ErrorCode::kUnsafe, "index of a delta: a piece is in " +
                                          safetensors::in_quotes(piece.file) +
                                          ", which is not beside it");
    }
  }
  return piece;
}

Json json_of(const DeltaTensor& tensor) {
  Json json = {
      {"key", tensor.key}, {"dtype", to_string(tensor.dtype)}, {"shape", json_of(tensor.shape)}};
  if (tensor.before) json["before"] = hex(*tensor.before);
  if (tensor.after) json["after"] = hex(*tensor.after);
  for (const DeltaPiece& piece : tensor.pieces) json["pieces"].push_back(json_of(piece));
  return json;
}

void check_pieces(const DeltaTensor& tensor) {
  if (tensor.removed() && !tensor.before) corrupt_delta("a tensor is in neither version");
  if ((tensor.removed() || tensor.unchanged()) && !tensor.pieces.empty()) {
    corrupt_delta("a tensor that is unchanged or removed has pieces");
  }
  std::vector<Box> boxes;
  for (const DeltaPiece& piece : tensor.pieces) boxes.push_back(piece.box);
  if (const auto two = find_overlap(boxes)) {
    corrupt_delta("the pieces " + to_string(boxes[two->first]) + " and " +
                  to_string(boxes[two->second]) + " overlap");
  }
  if (tensor.before) return;
  uint64_t covered = 0;
  for (const DeltaPiece& piece : tensor.pieces) {
    if (piece.kind != DeltaKind::kWhole)
      corrupt_delta("a new tensor has a piece that is not whole");
    covered += static_cast<uint64_t>(piece.box.numel()) * itemsize(tensor.dtype);
  }
  if (covered != tensor.bytes()) corrupt_delta("the pieces of a new tensor do not cover it");
}

DeltaTensor tensor_of(const Json& json) {
  DeltaTensor tensor;
  tensor.key = json.at("key").get<std::string>();
  try {
    const auto dtype = parse_dtype(json.at("dtype").get<std::string>());
    if (!dtype) corrupt_delta("unknown dtype " + safetensors::in_quotes(json.at("dtype").dump()));
    tensor.dtype = *dtype;
    tensor.shape = dims_of(json.at("shape"));
    contiguous_strides(tensor.shape);  // refuses what overflows even with a dim of 0
    checked_mul(numel(tensor.shape), static_cast<int64_t>(itemsize(tensor.dtype)), "bytes");
    if (json.contains("before")) tensor.before = parse_hex(json["before"].get<std::string>());
    if (json.contains("after")) tensor.after = parse_hex(json["after"].get<std::string>());
    for (const Json& piece : json.value("pieces", Json::array())) {
      tensor.pieces.push_back(piece_of(piece, tensor.shape, tensor.dtype));
    }
    check_pieces(tensor);
  } catch (const Error& error) {
    const bool from_arguments = error.code() == ErrorCode::kInvalidArgument;
    throw Error(from_arguments ? ErrorCode::kCorrupt : error.code(), error.message())
        .with_key(tensor.key);
  }
  return tensor;
}

std::vector<TensorSum> sums(const DeltaIndex& index, std::optional<uint32_t> DeltaTensor::* crc) {
  std::vector<TensorSum> found;
  for (const DeltaTensor& tensor : index.tensors) {
    if (tensor.*crc) found.push_back({tensor.key, tensor.dtype, tensor.shape, *(tensor.*crc)});
  }
  return found;
}

std::string id_of(const DeltaIndex& index, std::optional<uint32_t> DeltaTensor::* crc) {
  return state_id(sums(index, crc));
}

bool in_order(const DeltaTensor& a, const DeltaTensor& b) {
  return std::pair(std::string_view(a.key), a.after.has_value()) <
         std::pair(std::string_view(b.key), b.after.has_value());
}

DeltaIndex index_of(const safetensors::HeaderTexts& metadata) {
  const auto text = [&](const char* name) -> const std::string& {
    const auto found = metadata.find(name);
    if (found == metadata.end()) corrupt_delta(std::string("it has no ") + name);
    return found->second;
  };
  if (text("version") != std::to_string(DeltaIndex::kVersion)) {
    throw Error(ErrorCode::kUnsupported, "index of a delta: version " +
                                             safetensors::in_quotes(text("version")) +
                                             ", but only 1 is known")
        .with_hint("use a newer Tilestone");
  }
  DeltaIndex index{.base = text("base"), .result = text("result"), .tensors = {}};
  for (const Json& tensor : Json::parse(text("tensors")))
    index.tensors.push_back(tensor_of(tensor));
  for (size_t i = 1; i < index.tensors.size(); ++i) {
    if (!in_order(index.tensors[i - 1], index.tensors[i])) corrupt_delta("keys are not in order");
  }
  if (id_of(index, &DeltaTensor::before) != index.base ||
      id_of(index, &DeltaTensor::after) != index.result) {
    corrupt_delta("its ids are not those of its tensors");
  }
  return index;
}

}  // namespace

std::string_view to_string(DeltaKind kind) {
  switch (kind) {
    case DeltaKind::kSparse:
      return "sparse";
    case DeltaKind::kXor:
      return "xor";
    case DeltaKind::kWhole:
      return "whole";
  }
  return "unknown";
}

std::vector<TensorSum> sums_after(const DeltaIndex& index) {
  return sums(index, &DeltaTensor::after);
}

DeltaIndex make_index(std::vector<DeltaTensor> tensors) {
  std::sort(tensors.begin(), tensors.end(), in_order);
  DeltaIndex index;
  index.tensors = std::move(tensors);
  index.base = id_of(index, &DeltaTensor::before);
  index.result = id_of(index, &DeltaTensor::after);
  return index;
}

std::string state_id(std::vector<TensorSum> tensors) {
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorSum& a, const TensorSum& b) { return a.key < b.key; });
  Sha256 hash;
  for (const TensorSum& tensor : tensors) {
    hash.add(as_bytes(fmt::format("{} {} {} {}\n", hex(tensor.crc32), to_string(tensor.dtype),
                                  json_of(tensor.shape).dump(), tensor.key)));
  }
  return hash.hex();
}

std::string delta_entry(const DeltaTensor& tensor, const DeltaPiece& piece) {
  return piece.box.shape == tensor.shape ? tensor.key : tensor.key + to_string(piece.box);
}

Bytes write_delta_header(const DeltaEntries& entries, const DeltaIndex* index) {
  std::set<std::string_view> keys;
  for (const safetensors::HeaderTensor& entry : entries) {
    check_safetensors(entry.key, entry.dtype, entry.shape);
    if (!keys.insert(entry.key).second) {
      throw Error(ErrorCode::kInvalidArgument, "two tensors of the delta would get the same key")
          .with_key(entry.key);
    }
  }
  if (index == nullptr) return safetensors::write_header(entries);
  Json json = Json::array();
  for (const DeltaTensor& tensor : index->tensors) {
    check_safetensors(tensor.key, DType::kUInt8, {});
    json.push_back(json_of(tensor));
  }
  const Bytes bytes =
      safetensors::write_header(entries, {{"format", std::string(kDeltaFormat)},
                                          {"version", std::to_string(DeltaIndex::kVersion)},
                                          {"base", index->base},
                                          {"result", index->result},
                                          {"tensors", json.dump()}});
  if (bytes.size() <= safetensors::kMaxHeader) return bytes;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the header of the delta would have {} bytes; the limit is {}",
                          bytes.size(), safetensors::kMaxHeader));
}

DeltaHeader parse_delta_header(ByteView text, uint64_t file_size, const std::string& file) {
  DeltaHeader header;
  const uint64_t data = safetensors::kLengthBytes + text.size();
  safetensors::HeaderTexts metadata;
  for (safetensors::HeaderTensor& tensor :
       safetensors::parse_header(text, file_size, file, &metadata)) {
    tensor.begin += data;
    tensor.end += data;
    header.entries.emplace(tensor.key, std::move(tensor));
  }
  if (metadata["format"] != kDeltaFormat) return header;
  with_file(file, [&] {
    try {
      header.index = index_of(metadata);
    } catch (const Json::exception& error) {
      corrupt_delta(error.what());
    }
  });
  return header;
}

}  // namespace tilestone
