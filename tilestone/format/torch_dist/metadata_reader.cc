#include "tilestone/format/torch_dist/metadata_reader_internal.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/file_name.h"
#include "tilestone/format/archive/pickle_schema_internal.h"
#include "tilestone/format/torch_dist/flattened_internal.h"

namespace tilestone::torch_dist {
namespace {

using namespace archive;  // pickles

// The classes in a metadata file. Their modules differ between versions; their names don't.
enum class MetadataClass : uint8_t {
  kOther,
  kMetadata,
  kTensor,
  kBytes,
  kChunk,
  kProperties,
  kIndex,
  kStorageInfo,
  kStorageMeta,
};

struct ClassName {
  MetadataClass value;
  std::string_view module;
  std::string_view name;
};

constexpr ClassName kClasses[] = {
    {MetadataClass::kMetadata, "torch.distributed.checkpoint.metadata", "Metadata"},
    {MetadataClass::kTensor, "torch.distributed.checkpoint.metadata", "TensorStorageMetadata"},
    {MetadataClass::kBytes, "torch.distributed.checkpoint.metadata", "BytesStorageMetadata"},
    {MetadataClass::kChunk, "torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"},
    {MetadataClass::kProperties, "torch.distributed.checkpoint.metadata", "TensorProperties"},
    {MetadataClass::kIndex, "torch.distributed.checkpoint.metadata", "MetadataIndex"},
    {MetadataClass::kStorageMeta, "torch.distributed.checkpoint.metadata", "StorageMeta"},
    {MetadataClass::kStorageInfo, "torch.distributed.checkpoint.filesystem", "_StorageInfo"},
    // Megatron-Core 0.15
    {MetadataClass::kMetadata, "megatron.core.dist_checkpointing.strategies.torch",
     "MCoreMetadata"},
    // torch 1.13 to 2.0
    {MetadataClass::kMetadata, "torch.distributed._shard.checkpoint.metadata", "Metadata"},
    {MetadataClass::kTensor, "torch.distributed._shard.checkpoint.metadata",
     "TensorStorageMetadata"},
    {MetadataClass::kBytes, "torch.distributed._shard.checkpoint.metadata", "BytesStorageMetadata"},
    {MetadataClass::kChunk, "torch.distributed._shard.checkpoint.metadata", "ChunkStorageMetadata"},
    {MetadataClass::kIndex, "torch.distributed._shard.checkpoint.metadata", "MetadataIndex"},
    {MetadataClass::kStorageInfo, "torch.distributed._shard.checkpoint.filesystem", "_StorageInfo"},
    // torch up to 2.5
    {MetadataClass::kProperties, "torch.distributed._shard.sharded_tensor.metadata",
     "TensorProperties"},
};

[[noreturn]] void corrupt(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "checkpoint metadata: " + problem);
}

// Whether a node is a call of a function or contains one.
bool holds_call(const Pickle& pickle, NodeId root) {
  std::vector<bool> seen(pickle.node_count());
  std::vector<NodeId> left = {root};
  while (!left.empty()) {
    const NodeId id = left.back();
    left.pop_back();
    if (id == kNoNode || Pickle::is_small(id) || seen[id]) continue;
    seen[id] = true;
    switch (pickle.kind(id)) {
      case NodeKind::kCall:
        return true;
      case NodeKind::kNew:
        left.insert(left.end(), {pickle.args(id), pickle.state(id)});
        break;
      case NodeKind::kPersistent:
        left.push_back(pickle.args(id));
        break;
      case NodeKind::kTuple:
      case NodeKind::kList:
      case NodeKind::kDict:
      case NodeKind::kSet:
      case NodeKind::kFrozenSet:
        left.insert(left.end(), pickle.items(id).begin(), pickle.items(id).end());
        break;
      default:
        break;
    }
  }
  return false;
}

// The error code for an unexpected node. A call of a function in it is an attack: no writer puts
// one there. An object of an unknown class may come from a newer writer. Everything else is damage.
ErrorCode refusal_of(const Pickle& pickle, NodeId id) {
  if (holds_call(pickle, id)) return ErrorCode::kUnsafe;
  const bool object = id != kNoNode && pickle.is(id, NodeKind::kNew);
  return object ? ErrorCode::kUnsupported : ErrorCode::kCorrupt;
}

class MetadataReader {
 public:
  explicit MetadataReader(const Pickle& pickle) : pickle_(pickle) {}

  Metadata read() {
    if (class_of(pickle_.root()) != MetadataClass::kMetadata) {
      throw Error(refusal_of(pickle_, pickle_.root()),
                  "expected a checkpoint's Metadata in the pickle, found " +
                      describe(pickle_, pickle_.root()));
    }
    const auto [tensors, planner, storage, storage_meta, version, megatron, plans] =
        FieldReader<7>({"state_dict_metadata", "planner_data", "storage_data", "storage_meta",
                        "version", "mcore_data", "all_local_plans"})
            .read(pickle_, state_of(pickle_.root(), "Metadata"));
    read_entries(tensors);
    read_paths(planner);
    read_storage(storage);
    resolve_unlocated_chunks();
    restore_flattened(megatron);
    read_storage_meta(storage_meta);
    name_writer(version, megatron != kNoNode || plans != kNoNode);
    return std::move(metadata_);
  }

 private:
  struct Entry {
    bool tensor = false;
    uint32_t number = 0;   // index into Metadata::tensors or Metadata::objects
    bool located = false;  // for objects: storage_data has its location
  };

  // ---- Classes ----

  MetadataClass class_of(NodeId id) {
    if (id == kNoNode) return MetadataClass::kOther;
    const NodeKind kind = pickle_.kind(id);
    if (kind != NodeKind::kNew && kind != NodeKind::kCall) return MetadataClass::kOther;
    const NodeId global = pickle_.callable(id);
    for (const auto& [seen, value] : seen_classes_) {
      if (seen == global) return value;
    }
    MetadataClass value = MetadataClass::kOther;
    for (const ClassName& known : kClasses) {
      if (pickle_.is_global(global, known.module, known.name)) value = known.value;
    }
    if (seen_classes_.size() < kMaxSeenClasses) seen_classes_.emplace_back(global, value);
    return value;
  }

  NodeId state_of(NodeId object, std::string_view what) {
    const NodeId state = pickle_.state(object);
    if (state == kNoNode || !pickle_.is(state, NodeKind::kDict)) {
      corrupt(std::string(what) + " has no fields");
    }
    return state;
  }

  std::span<const NodeId> dict_of(NodeId id, std::string_view what) {
    if (id == kNoNode || !pickle_.is(id, NodeKind::kDict)) {
      corrupt(std::string(what) + " is " + describe(pickle_, id) + ", not a dict");
    }
    return pickle_.items(id);
  }

  // ---- state_dict_metadata ----

  void read_entries(NodeId id) {
    const auto items = dict_of(id, "state_dict_metadata");
    entries_.reserve(items.size() / 2);
    for (size_t i = 0; i < items.size(); i += 2) {
      const std::string_view key = read_string(pickle_, items[i], "a key");
      with_key(key, [&] { read_entry(key, items[i + 1]); });
    }
  }

  // Of the entry just added, among all entries: stock lists them in the order of the state.
  uint32_t order_of_last() const {
    return static_cast<uint32_t>(metadata_.tensors.size() + metadata_.objects.size() - 1);
  }

  void read_entry(std::string_view key, NodeId id) {
    Entry entry;
    const MetadataClass kind = class_of(id);
    if (kind == MetadataClass::kTensor) {
      entry = {true, static_cast<uint32_t>(metadata_.tensors.size()), false};
      metadata_.tensors.push_back(read_tensor(key, id));
      metadata_.tensors.back().order = order_of_last();
    } else if (kind == MetadataClass::kBytes) {
      entry = {false, static_cast<uint32_t>(metadata_.objects.size()), false};
      metadata_.objects.push_back({std::string(key), {}, {}});
      metadata_.objects.back().order = order_of_last();
    } else {
      throw Error(refusal_of(pickle_, id),
                  "expected an entry of tensor or bytes metadata, found " + describe(pickle_, id));
    }
    if (!entries_.emplace(key, entry).second) corrupt("the key is listed twice");
  }

  StoredTensor read_tensor(std::string_view key, NodeId id) {
    const auto [properties, size, chunks] = tensor_fields_.read(pickle_, state_of(id, "a tensor"));
    StoredTensor tensor;
    tensor.key = key;
    tensor.dtype = read_properties(properties);
    tensor.shape = read_dims(pickle_, size, "the tensor's size");
    check_size(tensor);
    if (chunks == kNoNode ||
        !(pickle_.is(chunks, NodeKind::kList) || pickle_.is(chunks, NodeKind::kTuple))) {
      corrupt("chunks are " + describe(pickle_, chunks) + ", not a list");
    }
    const auto nodes = pickle_.items(chunks);
    tensor.chunks.reserve(nodes.size());
    for (NodeId chunk : nodes) tensor.chunks.push_back(read_chunk(chunk, tensor.shape));
    return tensor;
  }

  static void check_size(const StoredTensor& tensor) {
    const auto elements = static_cast<uint64_t>(numel(tensor.shape));
    if (elements > INT64_MAX / itemsize(tensor.dtype)) {
      corrupt("the tensor's size in bytes overflows");
    }
  }

  DType read_properties(NodeId id) {
    if (class_of(id) != MetadataClass::kProperties) {
      corrupt("properties are " + describe(pickle_, id) + ", not TensorProperties");
    }
    const NodeId state = pickle_.state(id);
    NodeId dtype = kNoNode;
    if (state != kNoNode && pickle_.is(state, NodeKind::kTuple)) {
      if (!pickle_.items(state).empty()) dtype = pickle_.items(state)[0];
    } else if (state != kNoNode && pickle_.is(state, NodeKind::kDict)) {
      dtype = FieldReader<1>({"dtype"}).read(pickle_, state)[0];
    }
    const auto known = read_dtype(pickle_, dtype);
    if (!known) {
      throw Error(ErrorCode::kUnsupported,
                  "the tensor's dtype is " + describe(pickle_, dtype) + ", which is not supported");
    }
    return *known;
  }

  StoredChunk read_chunk(NodeId id, const Dims& shape) {
    if (class_of(id) != MetadataClass::kChunk) {
      corrupt("a chunk is " + describe(pickle_, id) + ", not ChunkStorageMetadata");
    }
    const auto [offsets, sizes] = chunk_fields_.read(pickle_, state_of(id, "a chunk"));
    StoredChunk chunk;
    chunk.box.offset = read_dims(pickle_, offsets, "a chunk's offsets");
    chunk.box.shape = read_dims(pickle_, sizes, "a chunk's sizes");
    check_bounds(chunk.box, shape);
    return chunk;
  }

  // ---- planner_data ----

  // Reads {key: path}. Planners other than torch's own may store anything here; it is ignored.
  void read_paths(NodeId id) {
    if (id == kNoNode || !pickle_.is(id, NodeKind::kDict)) return;
    const auto items = pickle_.items(id);
    for (size_t i = 0; i < items.size(); i += 2) {
      if (!pickle_.is(items[i], NodeKind::kString)) continue;
      const auto entry = entries_.find(pickle_.text(items[i]));
      if (entry == entries_.end()) continue;
      Path path = read_path(items[i + 1]);
      if (entry->second.tensor) {
        metadata_.tensors[entry->second.number].path = std::move(path);
      } else {
        metadata_.objects[entry->second.number].path = std::move(path);
      }
    }
  }

  Path read_path(NodeId id) {
    Path path;
    if (!pickle_.is(id, NodeKind::kTuple) && !pickle_.is(id, NodeKind::kList)) return path;
    for (NodeId element : pickle_.items(id)) {
      if (pickle_.is(element, NodeKind::kString)) {
        path.emplace_back(std::string(pickle_.text(element)));
      } else if (pickle_.is(element, NodeKind::kInt)) {
        path.emplace_back(pickle_.integer(element));
      } else {
        return {};
      }
    }
    return path;
  }

  // ---- storage_data ----

  void read_storage(NodeId id) {
    const auto items = dict_of(id, "storage_data");
    located_.resize(metadata_.tensors.size());
    for (size_t i = 0; i < located_.size(); ++i) {
      located_[i].assign(metadata_.tensors[i].chunks.size(), false);
    }
    for (size_t i = 0; i < items.size(); i += 2) read_location(items[i], items[i + 1]);
  }

  void read_location(NodeId index, NodeId info) {
    if (class_of(index) != MetadataClass::kIndex) {
      corrupt("a key of storage_data is " + describe(pickle_, index) + ", not MetadataIndex");
    }
    const auto [fqn, offset, hint] = index_fields_.read(pickle_, state_of(index, "MetadataIndex"));
    const std::string_view key = read_string(pickle_, fqn, "a key in storage_data");
    Entry* const entry = entry_of(fqn, key);
    with_key(key, [&] {
      if (entry == nullptr) {
        corrupt("storage_data names a key that state_dict_metadata does not have");
      }
      const ItemLocation at = read_info(info);
      if (!entry->tensor) {
        if (std::exchange(entry->located, true)) corrupt("storage_data lists the object twice");
        metadata_.objects[entry->number].at = at;
      } else {
        locate_chunk(entry->number, offset, hint, at);
      }
    });
  }

  // Null for an unknown key. The last entry is cached, because items of one tensor often follow one
  // another and share the node of their key.
  Entry* entry_of(NodeId id, std::string_view key) {
    if (id != last_key_) {
      const auto known = entries_.find(key);
      last_entry_ = known != entries_.end() ? &known->second : nullptr;
      last_key_ = id;
    }
    return last_entry_;
  }

  ItemLocation read_info(NodeId id) {
    if (class_of(id) != MetadataClass::kStorageInfo) {
      throw Error(refusal_of(pickle_, id),
                  "expected a _StorageInfo of torch's file system writer in storage_data, found " +
                      describe(pickle_, id));
    }
    const auto [path, offset, length, transforms] =
        info_fields_.read(pickle_, state_of(id, "_StorageInfo"));
    ItemLocation at;
    at.file = file_index(path);
    at.codec = read_codec(transforms);
    at.offset = static_cast<uint64_t>(read_count(pickle_, offset, "an item's offset"));
    at.length = static_cast<uint64_t>(read_count(pickle_, length, "an item's length"));
    return at;
  }

  uint32_t file_index(NodeId id) {
    if (id == last_path_ && id != kNoNode) return last_file_;
    const std::string_view name = read_string(pickle_, id, "relative_path");
    const auto [known, fresh] = files_.emplace(name, static_cast<uint32_t>(metadata_.files.size()));
    if (fresh) {
      check_file_name(name);
      metadata_.files.emplace_back(name);
    }
    last_path_ = id;
    last_file_ = known->second;
    return last_file_;
  }

  Codec read_codec(NodeId id) {
    if (id == kNoNode || pickle_.is(id, NodeKind::kNone)) return Codec::kNone;
    if (!pickle_.is(id, NodeKind::kList) && !pickle_.is(id, NodeKind::kTuple)) {
      corrupt("transform_descriptors is " + describe(pickle_, id) + ", not a list");
    }
    const auto names = pickle_.items(id);
    if (names.empty()) return Codec::kNone;
    if (names.size() == 1 && pickle_.is(names[0], NodeKind::kString) &&
        pickle_.text(names[0]) == "stream.zstd/1") {
      return Codec::kZstd;
    }
    std::string all;
    for (NodeId name : names) {
      all += all.empty() ? "" : ", ";
      all += pickle_.is(name, NodeKind::kString) ? std::string(pickle_.text(name).substr(0, 100))
                                                 : describe(pickle_, name);
    }
    throw Error(ErrorCode::kUnsupported,
                "the item was transformed by " + all + "; only stream.zstd/1 is supported")
        .with_hint(
            "load it with torch or tilestone.dcp, and pass storage_reader=FileSystemReader(PATH, "
            "_extension_registry=...) with an ExtensionRegistry that knows the extension");
  }

  // Sets the location of the chunk at `offset`. `hint`: its index among the chunks, which is
  // correct in all ordinary files.
  void locate_chunk(uint32_t number, NodeId offset, NodeId hint, const ItemLocation& at) {
    StoredTensor& tensor = metadata_.tensors[number];
    const bool no_offset = offset == kNoNode || pickle_.is(offset, NodeKind::kNone);
    const Dims wanted = no_offset ? Dims(tensor.shape.size(), 0)
                                  : read_dims(pickle_, offset, "an offset in storage_data");
    size_t chunk = tensor.chunks.size();
    if (hint != kNoNode && pickle_.is(hint, NodeKind::kInt)) {
      const auto index = static_cast<uint64_t>(pickle_.integer(hint));
      if (index < tensor.chunks.size() && tensor.chunks[index].box.offset == wanted) chunk = index;
    }
    if (chunk == tensor.chunks.size()) chunk = find_chunk(number, wanted);
    if (located_[number][chunk]) {
      corrupt("storage_data lists the chunk at " + to_string(wanted) + " twice");
    }
    located_[number][chunk] = true;
    tensor.chunks[chunk].at = at;
  }

  size_t find_chunk(uint32_t number, const Dims& offset) {
    const std::vector<StoredChunk>& chunks = metadata_.tensors[number].chunks;
    const std::vector<uint32_t>& order = by_offset(number);
    const auto found = std::lower_bound(
        order.begin(), order.end(), offset,
        [&](uint32_t chunk, const Dims& value) { return chunks[chunk].box.offset < value; });
    if (found == order.end() || chunks[*found].box.offset != offset) {
      corrupt("storage_data names a chunk at " + to_string(offset) +
              " that the tensor does not have");
    }
    return *found;
  }

  // The tensor's chunks sorted by offset; among those at the same offset, chunks with elements come
  // first. Built on the first call.
  const std::vector<uint32_t>& by_offset(uint32_t number) {
    std::vector<uint32_t>& order = orders_[number];
    const std::vector<StoredChunk>& chunks = metadata_.tensors[number].chunks;
    if (!order.empty() || chunks.empty()) return order;
    order.resize(chunks.size());
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      const Dims& x = chunks[a].box.offset;
      const Dims& y = chunks[b].box.offset;
      if (!(x == y)) return x < y;
      const bool a_empty = chunks[a].box.empty();
      const bool b_empty = chunks[b].box.empty();
      return a_empty != b_empty ? b_empty : a < b;
    });
    return order;
  }

  // Handles chunks that have no location. An empty chunk is removed. A chunk with elements may have
  // the same offset as an empty one; storage_data then has one location for both.
  void resolve_unlocated_chunks() {
    for (uint32_t number = 0; number < metadata_.tensors.size(); ++number) {
      if (std::find(located_[number].begin(), located_[number].end(), false) !=
          located_[number].end()) {
        resolve_unlocated(number);
      }
    }
    for (const auto& [key, entry] : entries_) {
      if (!entry.tensor && !entry.located) {
        throw Error(ErrorCode::kCorrupt,
                    "checkpoint metadata: storage_data has no location of the object")
            .with_key(key);
      }
    }
  }

  void resolve_unlocated(uint32_t number) {
    StoredTensor& tensor = metadata_.tensors[number];
    std::map<Dims, ItemLocation> located;
    for (size_t i = 0; i < tensor.chunks.size(); ++i) {
      if (located_[number][i]) located.emplace(tensor.chunks[i].box.offset, tensor.chunks[i].at);
    }
    std::vector<StoredChunk> kept;
    for (size_t i = 0; i < tensor.chunks.size(); ++i) {
      const StoredChunk& chunk = tensor.chunks[i];
      if (located_[number][i]) {
        kept.push_back(chunk);
      } else if (!chunk.box.empty()) {
        const auto namesake = located.find(chunk.box.offset);
        if (namesake == located.end()) {
          throw Error(ErrorCode::kCorrupt,
                      "checkpoint metadata: storage_data has no location of the chunk " +
                          to_string(chunk.box))
              .with_key(tensor.key);
        }
        kept.push_back({chunk.box, namesake->second});
      }
    }
    tensor.chunks = std::move(kept);
  }

  // ---- mcore_data ----

  // Reads {key: fields}. Megatron-Core 0.9 and 0.13 write fields for every tensor, but only for
  // flattened ones do they contain an original shape. Fields of a tensor that Megatron-Core has
  // removed from the checkpoint remain here.
  void restore_flattened(NodeId id) {
    if (id == kNoNode || pickle_.is(id, NodeKind::kNone)) return;
    const auto items = dict_of(id, "mcore_data");
    FieldReader<1> fields({"nd_reformulated_orig_global_shape"});
    for (size_t i = 0; i < items.size(); i += 2) {
      const std::string_view key = read_string(pickle_, items[i], "a key in mcore_data");
      with_key(key, [&] {
        dict_of(items[i + 1], "the tensor's entry in mcore_data");
        const NodeId original = fields.read(pickle_, items[i + 1])[0];
        const auto entry = entries_.find(key);
        if (original == kNoNode || entry == entries_.end()) return;
        if (!entry->second.tensor) corrupt("mcore_data has a shape for an object");
        restore_original(metadata_.tensors[entry->second.number],
                         read_dims(pickle_, original, "the flattened tensor's original shape"));
      });
    }
  }

  // ---- storage_meta and version ----

  void read_storage_meta(NodeId id) {
    if (class_of(id) != MetadataClass::kStorageMeta) return;
    const NodeId save_id =
        FieldReader<1>({"save_id"}).read(pickle_, state_of(id, "StorageMeta"))[0];
    if (save_id != kNoNode && pickle_.is(save_id, NodeKind::kString)) {
      metadata_.save_id = pickle_.text(save_id);
    }
  }

  void name_writer(NodeId version, bool megatron) {
    metadata_.writer = megatron ? "Megatron-Core (torch_dist" : "PyTorch (torch_dist";
    if (version != kNoNode && pickle_.is(version, NodeKind::kString)) {
      metadata_.writer += " " + std::string(pickle_.text(version).substr(0, 32));
    }
    metadata_.writer += ")";
  }

  static constexpr size_t kMaxSeenClasses = 32;

  const Pickle& pickle_;
  Metadata metadata_;
  std::unordered_map<std::string_view, Entry> entries_;
  std::vector<std::vector<bool>> located_;  // by tensor, by chunk
  std::unordered_map<uint32_t, std::vector<uint32_t>> orders_;
  std::unordered_map<std::string_view, uint32_t> files_;
  NodeId last_key_ = kNoNode;
  Entry* last_entry_ = nullptr;
  NodeId last_path_ = kNoNode;
  uint32_t last_file_ = 0;
  std::vector<std::pair<NodeId, MetadataClass>> seen_classes_;
  FieldReader<3> tensor_fields_{{"properties", "size", "chunks"}};
  FieldReader<2> chunk_fields_{{"offsets", "sizes"}};
  FieldReader<3> index_fields_{{"fqn", "offset", "index"}};
  FieldReader<4> info_fields_{{"relative_path", "offset", "length", "transform_descriptors"}};
};

}  // namespace

Metadata parse_metadata(ByteView bytes) {
  const Pickle pickle = Pickle::parse(bytes);
  try {
    return MetadataReader(pickle).read();
  } catch (Error& error) {
    // Geometry reports an invalid box or shape as an invalid argument. Here it comes from a file.
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    throw Error(ErrorCode::kCorrupt, "checkpoint metadata: " + error.message())
        .with_key(error.key());
  }
}

}  // namespace tilestone::torch_dist
