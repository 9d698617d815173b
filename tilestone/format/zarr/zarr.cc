#include "tilestone/format/zarr/zarr.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/archive/archive_writer_internal.h"
#include "tilestone/format/megatron_mark.h"
#include "tilestone/format/zarr/array_metadata_internal.h"
#include "tilestone/format/zarr/directory_internal.h"
#include "tilestone/format/zarr/dtype_names_internal.h"
#include "tilestone/format/zarr/key_conflicts_internal.h"
#include "tilestone/format/zarr/names_internal.h"
#include "tilestone/geometry/grid.h"
#include "tilestone/geometry/padding.h"

namespace tilestone {
namespace zarr {
namespace {

[[noreturn]] void refuse_box(const std::string& key, const Box& box, const Dims& shape) {
  throw Error(ErrorCode::kInvalidArgument,
              "zarr can only store the cells of one regular grid, but the box " + to_string(box) +
                  " of the tensor with shape " + to_string(shape) +
                  " does not fit the grid of the other boxes")
      .with_key(key)
      .with_hint("save in the torch_dist format");
}

// The cell shape of the grid that the ranks have agreed on. The piece must be a cell of it.
const Dims& grid_of_item(const TensorItem& item, const Piece& piece) {
  if (!item.chunk_shape) {
    throw Error(ErrorCode::kInternal, "the tensor has no grid").with_key(item.key);
  }
  if (!is_cell(piece.box, item.global_shape, *item.chunk_shape)) {
    refuse_box(item.key, piece.box, item.global_shape);
  }
  return *item.chunk_shape;
}

// The array that holds the tensor. tensor.chunks must have the chunks of all ranks.
ArrayMetadata array_of(const StoredTensor& tensor) {
  std::vector<Box> boxes;
  for (const StoredChunk& chunk : tensor.chunks) boxes.push_back(chunk.box);
  Box odd;
  const auto grid = grid_of(tensor.shape, boxes, &odd);
  if (!grid) refuse_box(tensor.key, odd, tensor.shape);
  return {.dtype = tensor.dtype, .shape = tensor.shape, .chunk_shape = *grid};
}

// How the tensor's items are stored in their files.
ArrayMetadata stored_as(const StoredTensor& tensor) {
  if (!tensor.chunk_shape) {
    throw Error(ErrorCode::kInternal, "the stored tensor has no grid").with_key(tensor.key);
  }
  return {tensor.dtype, tensor.shape, *tensor.chunk_shape, tensor.fortran_order};
}

std::string size_problem(uint64_t expected, uint64_t found) {
  return "expected a chunk of " + std::to_string(expected) + " bytes, found " +
         std::to_string(found) + " bytes";
}

void check_dtype(const std::string& key, DType dtype) {
  if (name_of(dtype)) return;
  throw Error(ErrorCode::kInvalidArgument, "zarr has no dtype for " + std::string(to_string(dtype)))
      .with_key(key)
      .with_hint("cast the tensor to another dtype, or save in the torch_dist format");
}

class CellEncoder final : public ItemEncoder {
 public:
  ItemRecipe tensor(const TensorItem& item, const Piece& piece, uint64_t) override {
    const Dims& cell = grid_of_item(item, piece);
    const uint64_t size = itemsize(piece.data.dtype);
    if (piece.data.bytes() != static_cast<uint64_t>(piece.box.numel()) * size) {
      throw Error(ErrorCode::kInternal, "a piece's data and box differ in size").with_key(item.key);
    }
    Segment segment{.size = piece.data.bytes(), .literal = nullptr, .tensor = &piece.data};
    if (piece.box.shape != cell) {
      segment.padding = std::make_shared<const Padding>(piece.box.shape, cell, size);
      segment.size = segment.padding->padded_bytes();
    }
    ItemRecipe recipe;
    recipe.length = segment.size;
    recipe.segments.push_back(std::move(segment));
    return recipe;
  }

  ItemRecipe object(const ObjectItem& item, uint64_t) override {
    return with_key(item.key, [&] { return archive::recipe_of_archive(item.value); });
  }
};

class ZarrFormat final : public Format {
 public:
  std::string_view name() const override { return kBackend; }

  void check(const Items& items) const override {
    std::vector<NamedTensor> tensors;
    for (const TensorItem& item : items.tensors) {
      check_tensor_key(item.key);
      check_dtype(item.key, item.dtype);
      tensors.push_back({item.key, item.global_shape.size()});
    }
    std::vector<std::string> objects;
    for (const ObjectItem& item : items.objects) {
      check_object_key(item.key);
      objects.push_back(item.key);
    }
    check_conflicts(tensors, objects);
  }

  bool needs_grid() const override { return true; }
  bool has_fixed_names() const override { return true; }

  std::optional<std::string> separate_file(const TensorItem& item,
                                           const Piece& piece) const override {
    const Dims& cell = grid_of_item(item, piece);
    return item.key + "/" + chunk_name(cell_index(piece.box, cell), '.');
  }
  std::optional<std::string> separate_file(const ObjectItem& item) const override {
    return object_file(item.key);
  }

  size_t longest_name(const TensorItem& item) const override {
    Dims last = item.global_shape;  // an index of the finest grid
    for (int64_t& dim : last) dim = std::max<int64_t>(dim, 1) - 1;
    return std::max(array_file(item.key).size(),
                    item.key.size() + 1 + chunk_name(last, '.').size());
  }
  size_t longest_name(const ObjectItem& item) const override {
    return object_file(item.key).size();
  }

  std::unique_ptr<ItemEncoder> encoder() const override { return std::make_unique<CellEncoder>(); }

  // Checks for conflicts again: each rank has checked only its own keys.
  Index encode_index(const Metadata& metadata) const override {
    std::vector<NamedTensor> tensors;
    std::vector<std::string> objects;
    for (const StoredTensor& t : metadata.tensors) tensors.push_back({t.key, t.shape.size()});
    for (const StoredObject& object : metadata.objects) objects.push_back(object.key);
    check_conflicts(tensors, objects);
    Index index;
    for (const StoredTensor& tensor : metadata.tensors) {
      index.push_back({array_file(tensor.key), write_array(array_of(tensor)), IndexRole::kBefore});
    }
    index.push_back({std::string(kMegatronConfig), write_megatron_config(kBackend, kBackendVersion),
                     IndexRole::kSwitch});
    return index;
  }

  // A checkpoint without tensors has no `.zarray`. It is recognised by the absence of files of
  // other formats.
  bool detect(std::span<const std::string> names) const override {
    if (!contains_name(names, kMegatronConfig)) return false;
    const auto is_foreign = [](std::string_view name) {
      return name == ".metadata" || name.ends_with(".distcp") || name.ends_with(".safetensors");
    };
    return description_files(names).size() > 1 ||
           std::none_of(names.begin(), names.end(), is_foreign);
  }

  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    if (!contains_name(names, kMegatronConfig)) {
      throw Error(ErrorCode::kNotFound, "no zarr checkpoint in the directory")
          .with_file(std::string(kMegatronConfig));
    }
    return description_files(names);
  }
  std::vector<std::string> sized_files(std::span<const std::string> names) const override {
    return item_files(names);
  }
  Metadata parse_index(const DirectoryFiles& files) const override {
    index_files(files.names);
    return read_directory(files);
  }

  // The metadata alone determines where each element is.
  std::vector<ProbeRange> probe(const ItemLocation&) const override { return {}; }

  StoredPayload parse_tensor(const StoredTensor& tensor, const StoredChunk& chunk,
                             const ItemLocation& at, std::span<const ByteView>) const override {
    const ArrayMetadata array = stored_as(tensor);
    if (at.length != array.chunk_bytes()) {
      throw Error(ErrorCode::kCorrupt, size_problem(array.chunk_bytes(), at.length));
    }
    return {.dtype = array.dtype,
            .shape = chunk.box.shape,
            .strides = array.chunk_strides(),
            .offset = 0,
            .record_offset = 0,
            .record_size = at.length,
            .record_crc32 = std::nullopt};
  }

  Value parse_object(const SharedBytes& item) const override { return archive::read_archive(item); }

  Bytes decode(Codec, ByteView, uint64_t) const override {
    throw Error(ErrorCode::kInternal, "zarr items have no codec");
  }

  std::optional<ItemFault> verify_tensor(const StoredTensor& tensor, const StoredChunk&,
                                         ByteView item) const override {
    const uint64_t expected = stored_as(tensor).chunk_bytes();
    if (item.size() == expected) return std::nullopt;
    return ItemFault{0, size_problem(expected, item.size())};
  }

  std::optional<ItemFault> verify_object(ByteView item) const override {
    return archive::find_fault(item);
  }
};

}  // namespace
}  // namespace zarr

std::shared_ptr<const Format> zarr_format() { return std::make_shared<zarr::ZarrFormat>(); }

}  // namespace tilestone
