#include "tilestone/format/torch_dist/metadata_writer_internal.h"

#include <array>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/format/torch_dist/pickle_writer_internal.h"

namespace tilestone::torch_dist {
namespace {

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

// Python's own picklers fill containers in steps of this size; readers need no more stack.
constexpr size_t kBatch = 1000;

class MetadataWriter {
 public:
  explicit MetadataWriter(const Metadata& metadata) : metadata_(metadata) {
    size_t chunks = 0;
    for (const StoredTensor& tensor : metadata.tensors) chunks += tensor.chunks.size();
    out_.reserve(128 * (chunks + metadata.tensors.size() + metadata.objects.size()) + 4096);
    files_.resize(metadata.files.size());
  }

  Bytes write() {
    object(kMetadataModule, "Metadata");
    out_.op(op::kEmptyDict);
    out_.op(op::kMark);
    out_.string("state_dict_metadata");
    put_entries();
    out_.string("planner_data");
    put_paths();
    out_.string("storage_data");
    put_locations();
    out_.string("storage_meta");
    put_storage_meta();
    out_.string("version");
    out_.string("1.0.0");
    out_.op(op::kSetItems);
    out_.op(op::kBuild);
    return std::move(out_).finish();
  }

 private:
  // ---- What is written once and then named by its memo index ----

  void field(std::string_view name) {
    repeated(names_, name, [&] { out_.string(name); });
  }
  void global(std::string_view module, std::string_view name) {
    repeated(globals_, name, [&] { out_.global(module, name); });
  }
  void key(const std::string& key) {
    repeated(keys_, key, [&] { out_.string(key); });
  }
  void file(uint32_t index) {
    if (files_[index]) return out_.get(*files_[index]);
    out_.string(metadata_.files[index]);
    files_[index] = out_.memoize();
  }

  using Memo = std::unordered_map<std::string_view, uint32_t>;
  template <typename Write>
  void repeated(Memo& memo, std::string_view name, const Write& write) {
    const auto known = memo.find(name);
    if (known != memo.end()) return out_.get(known->second);
    write();
    memo.emplace(name, out_.memoize());
  }

  void object(std::string_view module, std::string_view name) {
    global(module, name);
    out_.op(op::kEmptyTuple);
    out_.op(op::kNewObj);
  }
  void begin_fields() {
    out_.op(op::kEmptyDict);
    out_.op(op::kMark);
  }
  void end_fields() {
    out_.op(op::kSetItems);
    out_.op(op::kBuild);
  }
  void size(const Dims& dims) {
    global("torch", "Size");
    out_.int_tuple(dims);
    out_.op(op::kTuple1);
    out_.op(op::kReduce);
  }

  // Runs put(i) for all i between marks, `fill` after each batch.
  template <typename Put>
  void batches(size_t count, uint8_t fill, const Put& put) {
    for (size_t i = 0; i < count; ++i) {
      if (i % kBatch == 0) out_.op(op::kMark);
      put(i);
      if (i % kBatch == kBatch - 1 || i == count - 1) out_.op(fill);
    }
  }

  // ---- state_dict_metadata ----

  void put_entries() {
    const size_t tensors = metadata_.tensors.size();
    out_.op(op::kEmptyDict);
    batches(tensors + metadata_.objects.size(), op::kSetItems, [&](size_t i) {
      if (i < tensors) {
        key(metadata_.tensors[i].key);
        put_tensor(metadata_.tensors[i]);
      } else {
        key(metadata_.objects[i - tensors].key);
        object(kMetadataModule, "BytesStorageMetadata");
      }
    });
  }

  void put_tensor(const StoredTensor& tensor) {
    object(kMetadataModule, "TensorStorageMetadata");
    begin_fields();
    field("properties");
    put_properties(tensor.dtype);
    field("size");
    size(tensor.shape);
    field("chunks");
    out_.op(op::kEmptyList);
    batches(tensor.chunks.size(), op::kAppends, [&](size_t i) { put_chunk(tensor.chunks[i].box); });
    end_fields();
  }

  void put_chunk(const Box& box) {
    object(kMetadataModule, "ChunkStorageMetadata");
    begin_fields();
    field("offsets");
    size(box.offset);
    field("sizes");
    size(box.shape);
    end_fields();
  }

  // dtype, layout, requires_grad, memory format, pin_memory
  void put_properties(DType dtype) {
    object(kMetadataModule, "TensorProperties");
    out_.op(op::kMark);
    global("torch", to_string(dtype));
    repeated(names_, "<layout>", [&] {
      out_.global("torch.serialization", "_get_layout");
      out_.string("torch.strided");
      out_.op(op::kTuple1);
      out_.op(op::kReduce);
    });
    out_.boolean(false);
    repeated(names_, "<memory format>", [&] {
      out_.global(kMetadataModule, "_MEM_FORMAT_ENCODING");
      out_.integer(0);
      out_.op(op::kTuple1);
      out_.op(op::kReduce);
    });
    out_.boolean(false);
    out_.op(op::kTuple);
    out_.op(op::kBuild);
  }

  // ---- planner_data ----

  void put_paths() {
    const size_t tensors = metadata_.tensors.size();
    std::vector<std::pair<const std::string*, const Path*>> paths;
    paths.reserve(tensors + metadata_.objects.size());
    for (const StoredTensor& tensor : metadata_.tensors) add_path(paths, tensor.key, tensor.path);
    for (const StoredObject& object : metadata_.objects) add_path(paths, object.key, object.path);
    out_.op(op::kEmptyDict);
    batches(paths.size(), op::kSetItems, [&](size_t i) {
      key(*paths[i].first);
      out_.op(op::kMark);
      for (const PathElement& element : *paths[i].second) {
        if (const auto* index = std::get_if<int64_t>(&element)) {
          out_.integer(*index);
        } else {
          out_.string(std::get<std::string>(element));
        }
      }
      out_.op(op::kTuple);
    });
  }

  // A key that is not its path is a top-level entry of the tree that stock readers rebuild.
  static void add_path(std::vector<std::pair<const std::string*, const Path*>>& paths,
                       const std::string& key, const Path& path) {
    if (!path.empty()) paths.emplace_back(&key, &path);
  }

  // ---- storage_data ----

  void put_locations() {
    out_.op(op::kEmptyDict);
    for (const StoredTensor& tensor : metadata_.tensors) {
      batches(tensor.chunks.size(), op::kSetItems, [&](size_t i) {
        put_index(tensor.key, i, &tensor.chunks[i].box.offset);
        put_info(tensor.key, tensor.chunks[i].at);
      });
    }
    batches(metadata_.objects.size(), op::kSetItems, [&](size_t i) {
      put_index(metadata_.objects[i].key, std::nullopt, nullptr);
      put_info(metadata_.objects[i].key, metadata_.objects[i].at);
    });
  }

  void put_index(const std::string& name, std::optional<size_t> chunk, const Dims* offset) {
    object(kMetadataModule, "MetadataIndex");
    begin_fields();
    field("fqn");
    key(name);
    field("index");
    if (chunk) {
      out_.integer(static_cast<int64_t>(*chunk));
    } else {
      out_.none();
    }
    if (offset != nullptr) {
      field("offset");
      size(*offset);
    }
    end_fields();
  }

  void put_info(const std::string& name, const ItemLocation& at) {
    object("torch.distributed.checkpoint.filesystem", "_StorageInfo");
    begin_fields();
    field("relative_path");
    if (at.file >= files_.size()) {
      throw Error(ErrorCode::kInternal, "an item in a file that the metadata has no name of")
          .with_key(name);
    }
    file(at.file);
    field("offset");
    out_.integer(static_cast<int64_t>(at.offset));
    field("length");
    out_.integer(static_cast<int64_t>(at.length));
    if (at.codec == Codec::kZstd) {
      field("transform_descriptors");
      out_.op(op::kEmptyList);
      out_.string("stream.zstd/1");
      out_.op(op::kAppend);
    }
    end_fields();
  }

  // ---- storage_meta ----

  // checkpoint_id stays None: the same bytes wherever a checkpoint lies, or is moved to.
  void put_storage_meta() {
    object(kMetadataModule, "StorageMeta");
    begin_fields();
    field("checkpoint_id");
    out_.none();
    field("save_id");
    out_.string(metadata_.save_id);
    field("load_id");
    out_.none();
    field("modules");
    out_.op(op::kEmptyList);
    end_fields();
  }

  const Metadata& metadata_;
  PickleWriter out_{4};
  Memo names_;
  Memo globals_;
  Memo keys_;
  std::vector<std::optional<uint32_t>> files_;
};

}  // namespace

Bytes write_metadata(const Metadata& metadata) { return MetadataWriter(metadata).write(); }

}  // namespace tilestone::torch_dist
