#include "tilestone/format/torch_checkpointing/torch_checkpointing.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/archive/file_archive_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/read_format_internal.h"
#include "tilestone/format/torch_checkpointing/parts_internal.h"

namespace tilestone {
namespace torch_checkpointing {
namespace {

class TorchCheckpointingFormat final : public ReadFormat {
 public:
  std::string_view name() const override { return "torch_checkpointing"; }
  bool items_may_share_bytes() const override { return true; }

  bool detect(std::span<const std::string> names) const override {
    return contains_name(names, kTorchCheckpointingIndex) ? !rank_files(names).empty()
                                                          : are_all_rank_files(names);
  }
  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    if (!detect(names)) {
      throw Error(ErrorCode::kNotFound, "no files of torch_checkpointing in the directory")
          .with_file(torch_checkpointing_file("model"));
    }
    if (!contains_name(names, kTorchCheckpointingIndex)) return {};
    return {std::string(kTorchCheckpointingIndex)};
  }
  std::vector<std::string> self_describing_files(
      std::span<const std::string> names) const override {
    return rank_files(names);
  }
  std::optional<ProbeRange> next_part(const std::string& name,
                                      const FileParts& read) const override {
    return with_file(name, [&] { return archive::next_part(read); });
  }
  Metadata parse_index(const DirectoryFiles& files) const override {
    index_files(files.names);
    try {
      return read_folder(files, *this);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      throw Error(ErrorCode::kCorrupt, error.message())  // what is invalid comes from a file
          .with_key(error.key())
          .with_file(error.file());
    }
  }
  // Objects are in the index.
  Value parse_object(const SharedBytes& item) const override { return read_torch_archive(item); }
  std::optional<ItemFault> verify_object(ByteView) const override { return std::nullopt; }
};

// ---- metadata.pkl ----

Value ints(const Dims& dims) {
  Value::List items(dims.begin(), dims.end());
  return Value::list(std::move(items));
}

Value one_rank() { return Value::tuple({Value(0)}); }

// A tensor that one rank has as a whole.
Value whole_tensor(const TensorView& tensor) {
  const Value mesh = Value::dict({{"device_type", "cpu"},
                                  {"mesh_shape", Value::tuple({Value(1)})},
                                  {"mesh_data", one_rank()},
                                  {"mesh_dim_names", nullptr}});
  Value data = Value::dict({{"global_shape", ints(tensor.shape)},
                            {"dtype", "torch." + std::string(to_string(tensor.dtype))},
                            {"stride", ints(contiguous_strides(tensor.shape))},
                            {"mesh_spec", mesh},
                            {"placements", Value::list({Value::dict({{"type", "Replicate"}})})}});
  Value described = Value::dict({{"type", "DTensorShardingMetadata"}, {"data", std::move(data)}});
  return Value::list(
      {Value::dict({{"sharding_metadata", std::move(described)}, {"ranks", one_rank()}})});
}

// Adds the tensors in the value. `path`: to the value, in its item.
void describe_tensors(const Value& value, nlohmann::json path, Value::Dict& tensors) {
  const auto below = [&](const Value& item, auto element) {
    path.push_back(std::move(element));
    describe_tensors(item, path, tensors);
    path.erase(path.size() - 1);
  };
  if (value.kind() == Value::Kind::kTensor) {
    tensors.emplace_back(path.dump(), whole_tensor(value.as_tensor()));
  } else if (value.kind() == Value::Kind::kDict) {
    for (const auto& [key, item] : value.as_dict()) {
      if (key.kind() == Value::Kind::kString) below(item, key.as_string());
      if (key.kind() == Value::Kind::kInt) below(item, key.as_int());
    }
  } else if (value.kind() == Value::Kind::kList || value.kind() == Value::Kind::kTuple) {
    for (size_t i = 0; i < value.items().size(); ++i) below(value.items()[i], i);
  }
}

}  // namespace
}  // namespace torch_checkpointing

std::shared_ptr<const Format> torch_checkpointing_format() {
  return std::make_shared<torch_checkpointing::TorchCheckpointingFormat>();
}

bool is_torch_checkpointing_item(std::string_view name) {
  constexpr size_t kLongest = 240;  // so that it can begin the name of a file
  return !name.empty() && name.size() <= kLongest &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '_' || c == '-';
         });
}

std::string torch_checkpointing_file(std::string_view item) { return std::string(item) + "_0.pt"; }

Value torch_checkpointing_index(const Value& items) {
  Value::Dict described;
  for (const auto& [name, item] : items.as_dict()) {
    Value::Dict tensors;
    torch_checkpointing::describe_tensors(item, nlohmann::json::array(), tensors);
    if (tensors.empty()) continue;
    described.emplace_back(
        name, Value::dict({{"nested_path_to_metadata", Value::dict(std::move(tensors))},
                           {"rank_to_layout_info", Value::dict({{Value(0), nullptr}})}}));
  }
  return Value::dict(
      {{"metadata", Value::dict(std::move(described))}, {"world_size", 1}, {"version", "2.0"}});
}

}  // namespace tilestone
