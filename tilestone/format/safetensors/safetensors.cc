#include "tilestone/format/safetensors/safetensors.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/read_format_internal.h"
#include "tilestone/format/safetensors/directory_internal.h"
#include "tilestone/format/safetensors/dtype_names_internal.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/safetensors/weight_map_internal.h"

namespace tilestone {
namespace safetensors {
namespace {

std::string five_digits(size_t number) {
  const std::string digits = std::to_string(number);
  return std::string(5 - std::min<size_t>(5, digits.size()), '0') + digits;
}

// Writes one tensor after the other, without anything between them.
class TensorsEncoder final : public ItemEncoder {
 public:
  // `pieces`: as in SafetensorsPlan; outlives the encoder.
  explicit TensorsEncoder(const SafetensorsPieces& pieces) : pieces_(pieces) {}

  Bytes begin_file(std::span<const FileItem> items) override {
    std::vector<HeaderTensor> tensors;
    for (const FileItem& item : items) {
      if (item.tensor == nullptr) refuse_object();
      HeaderTensor& tensor = tensors.emplace_back(HeaderTensor{
          .key = item.tensor->key, .dtype = item.tensor->dtype, .shape = item.piece->box.shape});
      const auto piece = pieces_.find(tensor.key);
      if (piece != pieces_.end()) tensor.piece = piece->second;
    }
    return write_header(tensors);
  }

  ItemRecipe tensor(const TensorItem&, const Piece& piece, uint64_t) override {
    ItemRecipe recipe;
    recipe.length = piece.data.bytes();
    recipe.segments.push_back(
        {.size = recipe.length, .literal = nullptr, .tensor = &piece.data, .padding = nullptr});
    return recipe;
  }

  ItemRecipe object(const ObjectItem&, uint64_t) override { refuse_object(); }

 private:
  [[noreturn]] static void refuse_object() {
    throw Error(ErrorCode::kInternal, "safetensors files have no objects");
  }

  const SafetensorsPieces& pieces_;
};

class SafetensorsFormat : public ReadFormat {
 public:
  std::string_view name() const override { return "safetensors"; }
  bool files_have_headers() const override { return true; }

  bool detect(std::span<const std::string> names) const override {
    return !data_files(names).empty() || !index_files_among(names).empty();
  }
  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    if (!detect(names)) {
      throw Error(ErrorCode::kNotFound, "no safetensors files in the directory")
          .with_file(std::string(kOnlyFile));
    }
    return index_files_among(names);
  }
  bool may_hold_pieces(std::string_view name) const override { return is_shard_name(name); }
  std::vector<std::string> self_describing_files(
      std::span<const std::string> names) const override {
    return data_files(names);
  }
  std::optional<ProbeRange> next_part(const std::string& name,
                                      const FileParts& read) const override {
    if (read.parts.empty()) return ProbeRange{0, std::min(read.size, kLengthBytes)};
    if (read.parts.size() > 1) return std::nullopt;
    const uint64_t length = header_length(read.parts.begin()->second, read.size, name);
    if (length == 0) return std::nullopt;
    return ProbeRange{kLengthBytes, length};
  }
  Metadata parse_index(const DirectoryFiles& files) const override {
    index_files(files.names);
    return read_directory(files);
  }

  Value parse_object(const SharedBytes&) const override { fail_no_objects(); }
  // A tensor of an unsupported dtype.
  std::optional<ItemFault> verify_object(ByteView) const override { return std::nullopt; }

 private:
  [[noreturn]] static void fail_no_objects() {
    throw Error(ErrorCode::kInternal, "safetensors files have no objects");
  }
};

class SafetensorsWriter final : public SafetensorsFormat {
 public:
  explicit SafetensorsWriter(SafetensorsPlan plan) : plan_(std::move(plan)) {}

  std::unique_ptr<ItemEncoder> encoder() const override {
    return std::make_unique<TensorsEncoder>(plan_.pieces);
  }
  void check(const Items& items) const override {
    for (const ObjectItem& item : items.objects) {
      throw Error(ErrorCode::kInvalidArgument, "safetensors can't hold objects, only tensors")
          .with_key(item.key);
    }
    for (const TensorItem& item : items.tensors) {
      check_safetensors(item.key, item.dtype, item.global_shape);
      file_of(item.key);
      for (const Piece& piece : item.pieces) {
        if (piece.box.shape == item.global_shape) continue;
        throw Error(ErrorCode::kInvalidArgument, "safetensors can't hold parts of tensors")
            .with_key(item.key);
      }
    }
  }
  using ReadFormat::longest_name;
  using ReadFormat::separate_file;
  std::optional<std::string> separate_file(const TensorItem& item, const Piece&) const override {
    return file_of(item.key);
  }
  size_t longest_name(const TensorItem& item) const override { return file_of(item.key).size(); }

  Index encode_index(const Metadata& metadata) const override {
    WeightMap map;
    for (const StoredTensor& tensor : metadata.tensors)
      map.emplace(tensor.key, file_of(tensor.key));
    return {{std::string(kIndexName), write_weight_map(map, metadata.tensor_bytes()),
             IndexRole::kSwitch}};
  }

 private:
  const std::string& file_of(const std::string& key) const {
    const auto found = plan_.files.find(key);
    if (found != plan_.files.end()) return found->second;
    if (!plan_.other_file.empty()) return plan_.other_file;
    throw Error(ErrorCode::kInvalidArgument, "no file is named for the tensor").with_key(key);
  }

  const SafetensorsPlan plan_;
};

}  // namespace
}  // namespace safetensors

std::shared_ptr<const Format> safetensors_format() {
  return std::make_shared<safetensors::SafetensorsFormat>();
}

std::map<std::string, std::string, std::less<>> safetensors_files(
    const std::vector<SafetensorsTensor>& tensors, uint64_t file_bytes) {
  std::vector<size_t> numbers;  // of the tensors' files
  size_t files = 1;
  uint64_t bytes = 0, header = safetensors::kEmptyHeader;
  for (const SafetensorsTensor& tensor : tensors) {
    const bool is_full = bytes > 0 && tensor.bytes > file_bytes - std::min(bytes, file_bytes);
    if (is_full || header + tensor.header_bytes > safetensors::kMaxHeader) {
      if (!numbers.empty() && numbers.back() == files) ++files;
      bytes = 0;
      header = safetensors::kEmptyHeader;
    }
    bytes += tensor.bytes;
    header += tensor.header_bytes;
    numbers.push_back(files);
  }
  std::map<std::string, std::string, std::less<>> names;
  for (size_t i = 0; i < tensors.size(); ++i) {
    names[tensors[i].key] = files == 1 ? std::string(safetensors::kOnlyFile)
                                       : "model-" + safetensors::five_digits(numbers[i]) + "-of-" +
                                             safetensors::five_digits(files) + ".safetensors";
  }
  safetensors::expect_index_fits(names);
  return names;
}

void check_safetensors(const std::string& key, DType dtype, const Dims& shape) {
  const bool is_text = safetensors::is_json_text(key);
  if (!is_text || key == safetensors::kMetadataKey) {
    throw Error(ErrorCode::kInvalidArgument,
                is_text ? "safetensors reserves this key"
                        : "safetensors can't hold the key, because it is not UTF-8")
        .with_key(key)
        .with_hint("rename the key");
  }
  if (!safetensors::name_of(dtype)) {
    throw Error(ErrorCode::kInvalidArgument,
                "safetensors has no dtype for " + std::string(to_string(dtype)))
        .with_key(key)
        .with_hint("cast the tensor to another dtype, or leave it out");
  }
  if (dtype == DType::kFloat4E2M1FNX2 && shape.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "safetensors counts single 4-bit elements, so a pair of them without dims has no "
                "shape there")
        .with_key(key);
  }
  const uint64_t bytes = safetensors_header_bytes(key, dtype, shape);
  if (bytes > safetensors::kMaxHeader - safetensors::kEmptyHeader) {
    throw Error(ErrorCode::kInvalidArgument, "the key needs " + std::to_string(bytes) +
                                                 " bytes of a safetensors header, whose limit is " +
                                                 std::to_string(safetensors::kMaxHeader))
        .with_key(key.substr(0, 60))
        .with_hint("rename the key");
  }
}

uint64_t safetensors_header_bytes(const std::string& key, DType dtype, const Dims& shape) {
  return safetensors::max_entry_bytes({.key = key, .dtype = dtype, .shape = shape});
}

std::shared_ptr<const Format> safetensors_writer(SafetensorsPlan plan) {
  return std::make_shared<safetensors::SafetensorsWriter>(std::move(plan));
}

}  // namespace tilestone
