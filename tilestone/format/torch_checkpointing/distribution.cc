#include <memory>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/archive/file_archive_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/json_value_internal.h"
#include "tilestone/format/torch_checkpointing/parts_internal.h"

namespace tilestone::torch_checkpointing {
namespace {

constexpr int64_t kMaxRanks = 1 << 24;  // of a pickled mesh

[[noreturn]] void corrupt(const std::string& problem) { throw Error(ErrorCode::kCorrupt, problem); }

const Value& at(const Value& dict, std::string_view key) {
  const Value* found = dict.kind() == Value::Kind::kDict ? dict.find(key) : nullptr;
  if (found == nullptr) corrupt("expected an entry \"" + std::string(key) + "\"");
  return *found;
}

// An attribute of a pickled object; null: it has none of this name.
const Value* attribute(const Value& object, std::string_view name) {
  if (object.kind() != Value::Kind::kOpaque) return nullptr;
  const Value& state = object.as_opaque().state;
  return state.kind() == Value::Kind::kDict ? state.find(name) : nullptr;
}

const Value::List& sequence(const Value& value) {
  if (value.kind() == Value::Kind::kList || value.kind() == Value::Kind::kTuple) {
    return value.items();
  }
  corrupt("expected a list, found a " + std::string(to_string(value.kind())));
}

Dims dims_of(const Value& value) {
  const Value::List& items = sequence(value);
  Dims dims(items.size(), 0);
  for (size_t d = 0; d < items.size(); ++d) {
    dims[d] = items[d].as_int();
    if (dims[d] < 0) corrupt("a size or offset is negative");
  }
  return dims;
}

std::vector<int> ranks_of(const Value& value) {
  std::vector<int> ranks;
  for (const Value& rank : sequence(value)) ranks.push_back(rank.as<int>());
  return ranks;
}

// `type`: the name of its class, with or without the underscore that torch has before some.
Placement placement_of(std::string_view type, const Value* dim, const Value* split) {
  if (type.starts_with('_')) type.remove_prefix(1);
  if (type == "Replicate") return Replicate{};
  if (type == "Shard" && dim != nullptr) return Shard{dim->as_int()};
  if (type == "StridedShard" && dim != nullptr && split != nullptr) {
    return StridedShard{dim->as_int(), split->as_int()};
  }
  throw Error(ErrorCode::kUnsupported,
              "the placement " + std::string(type.substr(0, 60)) + " is not known");
}

Distribution of_dtensor(const Value& data) {
  const Value& mesh = at(data, "mesh_spec");
  std::vector<Placement> placements;
  for (const Value& placement : sequence(at(data, "placements"))) {
    placements.push_back(placement_of(at(placement, "type").as_string(), placement.find("dim"),
                                      placement.find("split_factor")));
  }
  Sharding sharding{Mesh(dims_of(at(mesh, "mesh_shape")), ranks_of(at(mesh, "mesh_data"))),
                    std::move(placements)};
  return {dims_of(at(data, "global_shape")), std::move(sharding)};
}

Distribution distribution_of(const Value& group) {
  const Value& described = at(group, "sharding_metadata");
  const std::string& type = at(described, "type").as_string();
  if (type != "DTensorShardingMetadata") {
    throw Error(ErrorCode::kUnsupported,
                "the description of a tensor is of the unknown type " + type.substr(0, 60));
  }
  Distribution found = of_dtensor(at(described, "data"));
  found.ranks = ranks_of(at(group, "ranks"));
  return found;
}

// "model" and ["layer",0,"weight"]: "model.layer.0.weight".
std::string key_of(const std::string& item, std::string_view json_path) {
  const Value path = value_of_json(json_path, "the path of a tensor");
  std::string key = item;
  for (const Value& element : sequence(path)) {
    key += "." + (element.kind() == Value::Kind::kInt ? std::to_string(element.as_int())
                                                      : element.as_string());
  }
  return key;
}

FolderIndex::Item item_of(const std::string& name, const Value& layouts) {
  FolderIndex::Item item{
      .files = {}, .serialization = std::string(kTorchSerialization), .ranks = {}};
  for (const auto& [rank, layout] : layouts.as_dict()) {
    std::string& file = item.files[rank.as<int>()];
    if (layout.is_null()) {
      file = name + "_" + std::to_string(rank.as_int()) + ".pt";
      continue;
    }
    file = at(layout, "file_path").as_string();
    item.serialization = at(at(layout, "serialization_format"), "type").as_string();
  }
  return item;
}

FolderIndex index_of(const Value& root) {
  const std::string& version = at(root, "version").as_string();
  if (version != "2.0") {
    throw Error(ErrorCode::kUnsupported,
                "the version \"" + version.substr(0, 20) + "\" is not known, only 2.0");
  }
  FolderIndex index;
  for (const auto& [name, item] : at(root, "metadata").as_dict()) {
    FolderIndex::Item& known = index.items[name.as_string()];
    known = item_of(name.as_string(), at(item, "rank_to_layout_info"));
    for (const auto& [path, groups] : at(item, "nested_path_to_metadata").as_dict()) {
      const std::string key = key_of(name.as_string(), path.as_string());
      with_key(key, [&] {
        for (const Value& group : sequence(groups)) {
          const Distribution& found = index.tensors[key].emplace_back(distribution_of(group));
          known.ranks.insert(found.ranks.begin(), found.ranks.end());
        }
      });
    }
  }
  return index;
}

bool is_named(const Value& value, std::string_view module, std::string_view name) {
  return value.kind() == Value::Kind::kOpaque && value.as_opaque().module == module &&
         value.as_opaque().name == name;
}

// The shape of a pickled DeviceMesh.
Dims mesh_shape(const Value* mesh) {
  const Value* const layout = mesh == nullptr ? nullptr : attribute(*mesh, "_layout");
  const Value* const axes = layout == nullptr ? nullptr : attribute(*layout, "axes");
  if (axes == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                "a DTensor was pickled by a version of torch whose device meshes can't be read")
        .with_hint("save with a resharder (ItemSpec(resharder=...)), which writes metadata.pkl");
  }
  std::vector<int64_t> sizes;
  for (const Value& axis : sequence(*axes)) {
    const Value* const shape = attribute(axis, "shape");
    if (shape == nullptr) corrupt("a device mesh has no shape");
    sizes.push_back(numel(dims_of(*shape)));
  }
  const Dims shape(sizes);
  if (numel(shape) > kMaxRanks) corrupt("a device mesh has too many ranks");
  return shape;
}

Distribution of_spec(const Value& spec, Dims shape) {
  const Value* const mesh = attribute(spec, "mesh");
  const Value* const coordinate =
      mesh == nullptr ? nullptr : attribute(*mesh, "_coordinate_on_dim");
  const Value* const placements = attribute(spec, "placements");
  if (coordinate == nullptr || placements == nullptr) {
    corrupt("a DTensor has no placements, or its device mesh does not have the rank");
  }
  Sharding sharding{Mesh::grid(mesh_shape(mesh)), {}};
  for (const Value& placement : sequence(*placements)) {
    const std::string name =
        placement.kind() == Value::Kind::kOpaque ? placement.as_opaque().name : "?";
    sharding.placements.push_back(
        placement_of(name, attribute(placement, "dim"), attribute(placement, "split_factor")));
  }
  return {std::move(shape), std::move(sharding), dims_of(*coordinate)};
}

// The local tensor in a pickled DTensor, and how that is distributed. nullopt for other values.
std::optional<std::pair<Value, Distribution>> read_dtensor(const Value& value) {
  if (is_named(value, "torch._utils", "_rebuild_parameter") && !value.as_opaque().args.empty()) {
    return read_dtensor(value.as_opaque().args[0]);
  }
  if (!is_named(value, "torch._tensor", "_rebuild_from_type_v2")) return std::nullopt;
  const Value::List& args = value.as_opaque().args;
  if (args.size() != 4 || !is_named(args[0], "torch._utils", "_rebuild_wrapper_subclass") ||
      args[1].kind() != Value::Kind::kOpaque || args[1].as_opaque().name != "DTensor") {
    return std::nullopt;
  }
  const Value::List& rebuilt = sequence(args[2]);
  if (rebuilt.size() < 3) corrupt("a DTensor has no shape");
  // Its __dict__ and its slots.
  const bool has_slots = args[3].kind() == Value::Kind::kTuple && args[3].items().size() == 2;
  const Value& state = has_slots ? args[3].items()[1] : args[3];
  return std::pair(at(state, "_local_tensor"), of_spec(at(state, "_spec"), dims_of(rebuilt[2])));
}

}  // namespace

LocalBoxes held_by(const Distribution& distribution, int rank, const Dims& local) {
  const auto& [mesh, placements] = distribution.sharding;
  const auto coordinate = distribution.coordinate ? distribution.coordinate : mesh.coordinate(rank);
  if (!coordinate) corrupt("rank " + std::to_string(rank) + " is not in the tensor's mesh");
  mesh.rank_at(*coordinate);  // which checks it
  return held_boxes(distribution.shape, mesh, *coordinate, placements, local);
}

FolderIndex parse_folder_index(ByteView pickle) { return index_of(read_pickle(pickle)); }

Value read_rank_file(const FileParts& read) {
  return archive::read_file(read, [](const Value& value) {
    auto tensor = read_dtensor(value);
    if (!tensor || tensor->first.kind() != Value::Kind::kTensor) {
      return archive::shown_in_file(value);
    }
    archive::FileTensor local = archive::stood_for(tensor->first.as_tensor());
    const Dims shape = tensor->second.shape;
    local.more = std::make_shared<const Distribution>(std::move(tensor->second));
    return archive::shown_in_file(archive::stand_in(std::move(local), shape));
  });
}

}  // namespace tilestone::torch_checkpointing
