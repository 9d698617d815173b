#include "tilestone/format/torch_dist/metadata_writer_internal.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/pickle_writer_internal.h"

namespace tilestone::torch_dist {
namespace {

using namespace archive;  // pickles

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

// Something that is written once and afterwards referred to by its memo index.
struct Memo {
  static constexpr uint32_t kUnset = ~uint32_t{0};
  uint32_t index = kUnset;
};
struct Field : Memo {
  explicit Field(std::string_view text) : name(text) {}
  std::string_view name;
};
struct Global : Memo {
  explicit Global(std::string_view text, std::string_view in = kMetadataModule)
      : module(in), name(text) {}
  std::string_view module;
  std::string_view name;
};

// The number of elements that are added to a container at once. Python's own picklers use the same
// number, so readers need no larger stack.
constexpr size_t kBatch = 1000;

class MetadataWriter {
 public:
  explicit MetadataWriter(const Metadata& metadata) : metadata_(metadata) {
    size_t chunks = 0;
    for (const StoredTensor& tensor : metadata.tensors) chunks += tensor.chunks.size();
    out_.reserve(128 * (chunks + metadata.tensors.size() + metadata.objects.size()) + 4096);
    files_.resize(metadata.files.size());
    keys_.resize(metadata.tensors.size() + metadata.objects.size());
  }

  Bytes write() {
    object(metadata_class_);
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
  // ---- Memoised parts ----

  template <typename Write>
  void once(Memo& memo, const Write& write) {
    if (memo.index != Memo::kUnset) return out_.get(memo.index);
    write();
    memo.index = out_.memoize();
  }
  void field(Field& field) {
    once(field, [&] { out_.string(field.name); });
  }
  void global(Global& global) {
    once(global, [&] { out_.global(global.module, global.name); });
  }
  // `item`: index into keys_.
  void key(size_t item) {
    const size_t tensors = metadata_.tensors.size();
    once(keys_[item], [&] {
      out_.string(item < tensors ? metadata_.tensors[item].key
                                 : metadata_.objects[item - tensors].key);
    });
  }
  void file(uint32_t index) {
    once(files_[index], [&] { out_.string(metadata_.files[index]); });
  }

  void object(Global& type) {
    global(type);
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
    global(size_class_);
    out_.int_tuple(dims);
    out_.op(op::kTuple1);
    out_.op(op::kReduce);
  }

  // Calls put(i) for all i < count. Writes a mark before each batch and the opcode `fill` after it.
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
      key(i);
      if (i < tensors) {
        put_tensor(metadata_.tensors[i]);
      } else {
        object(bytes_class_);
      }
    });
  }

  void put_tensor(const StoredTensor& tensor) {
    object(tensor_class_);
    begin_fields();
    field(properties_);
    put_properties(tensor.dtype);
    field(size_);
    size(tensor.shape);
    field(chunks_);
    out_.op(op::kEmptyList);
    batches(tensor.chunks.size(), op::kAppends, [&](size_t i) { put_chunk(tensor.chunks[i]); });
    end_fields();
  }

  void put_chunk(const StoredChunk& chunk) {
    if (chunk.flat) throw Error(ErrorCode::kInternal, "a chunk shares its item with other chunks");
    const Box& box = chunk.box;
    object(chunk_class_);
    begin_fields();
    field(offsets_);
    size(box.offset);
    field(sizes_);
    size(box.shape);
    end_fields();
  }

  // A tuple of dtype, layout, requires_grad, memory format and pin_memory.
  void put_properties(DType dtype) {
    object(properties_class_);
    out_.op(op::kMark);
    const auto type = dtypes_.try_emplace(dtype, to_string(dtype), "torch").first;
    global(type->second);
    once(layout_, [&] {
      out_.global("torch.serialization", "_get_layout");
      out_.string("torch.strided");
      out_.op(op::kTuple1);
      out_.op(op::kReduce);
    });
    out_.boolean(false);
    once(memory_format_, [&] {
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
    const auto path_of = [&](size_t item) -> const Path& {
      return item < tensors ? metadata_.tensors[item].path : metadata_.objects[item - tensors].path;
    };
    // A key without a path becomes a top-level entry of the tree that stock readers rebuild.
    std::vector<size_t> items;
    for (size_t item = 0; item < keys_.size(); ++item) {
      if (!path_of(item).empty()) items.push_back(item);
    }
    out_.op(op::kEmptyDict);
    batches(items.size(), op::kSetItems, [&](size_t i) {
      key(items[i]);
      out_.op(op::kMark);
      for (const PathElement& element : path_of(items[i])) {
        if (const auto* index = std::get_if<int64_t>(&element)) {
          out_.integer(*index);
        } else {
          out_.string(std::get<std::string>(element));
        }
      }
      out_.op(op::kTuple);
    });
  }

  // ---- storage_data ----

  void put_locations() {
    out_.op(op::kEmptyDict);
    const size_t tensors = metadata_.tensors.size();
    for (size_t item = 0; item < tensors; ++item) {
      const StoredTensor& tensor = metadata_.tensors[item];
      batches(tensor.chunks.size(), op::kSetItems, [&](size_t i) {
        put_index(item, i, &tensor.chunks[i].box.offset);
        put_info(tensor.key, tensor.chunks[i].at);
      });
    }
    batches(metadata_.objects.size(), op::kSetItems, [&](size_t i) {
      put_index(tensors + i, std::nullopt, nullptr);
      put_info(metadata_.objects[i].key, metadata_.objects[i].at);
    });
  }

  void put_index(size_t item, std::optional<size_t> chunk, const Dims* offset) {
    object(index_class_);
    begin_fields();
    field(fqn_);
    key(item);
    field(index_);
    if (chunk) {
      out_.integer(static_cast<int64_t>(*chunk));
    } else {
      out_.none();
    }
    if (offset != nullptr) {
      field(offset_);
      size(*offset);
    }
    end_fields();
  }

  void put_info(const std::string& name, const ItemLocation& at) {
    object(info_class_);
    begin_fields();
    field(relative_path_);
    if (at.file >= files_.size()) {
      throw Error(ErrorCode::kInternal, "an item has a file index that is not in the metadata")
          .with_key(name);
    }
    file(at.file);
    field(offset_);
    out_.integer(static_cast<int64_t>(at.offset));
    field(length_);
    out_.integer(static_cast<int64_t>(at.length));
    if (at.codec == Codec::kZstd) {
      field(transform_descriptors_);
      out_.op(op::kEmptyList);
      out_.string("stream.zstd/1");
      out_.op(op::kAppend);
    }
    end_fields();
  }

  // ---- storage_meta ----

  // checkpoint_id is None, so that the bytes don't depend on the checkpoint's location.
  void put_storage_meta() {
    object(storage_meta_class_);
    begin_fields();
    field(checkpoint_id_);
    out_.none();
    field(save_id_);
    out_.string(metadata_.save_id);
    field(load_id_);
    out_.none();
    field(modules_);
    out_.op(op::kEmptyList);
    end_fields();
  }

  const Metadata& metadata_;
  PickleWriter out_{4};
  std::vector<Memo> files_;
  std::vector<Memo> keys_;  // of tensors, then objects
  std::map<DType, Global> dtypes_;
  Memo layout_;
  Memo memory_format_;

  Global metadata_class_{"Metadata"};
  Global tensor_class_{"TensorStorageMetadata"};
  Global properties_class_{"TensorProperties"};
  Global chunk_class_{"ChunkStorageMetadata"};
  Global bytes_class_{"BytesStorageMetadata"};
  Global index_class_{"MetadataIndex"};
  Global storage_meta_class_{"StorageMeta"};
  Global info_class_{"_StorageInfo", "torch.distributed.checkpoint.filesystem"};
  Global size_class_{"Size", "torch"};

  Field properties_{"properties"};
  Field size_{"size"};
  Field chunks_{"chunks"};
  Field offsets_{"offsets"};
  Field sizes_{"sizes"};
  Field fqn_{"fqn"};
  Field index_{"index"};
  Field offset_{"offset"};
  Field relative_path_{"relative_path"};
  Field length_{"length"};
  Field transform_descriptors_{"transform_descriptors"};
  Field checkpoint_id_{"checkpoint_id"};
  Field save_id_{"save_id"};
  Field load_id_{"load_id"};
  Field modules_{"modules"};
};

}  // namespace

Bytes write_metadata(const Metadata& metadata) { return MetadataWriter(metadata).write(); }

}  // namespace tilestone::torch_dist
