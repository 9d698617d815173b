#include "tilestone/format/zarr/zarr_testing.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "tilestone/format/format_testing.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/geometry/grid.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::zarr {
namespace {

Dims grid_of_pieces(const TensorItem& item) {
  Dims cell;
  for (const Piece& piece : item.pieces) widen_cell(cell, piece.box);
  return cell.empty() ? Dims(item.global_shape.size(), 1) : cell;
}

}  // namespace

DirectoryFiles directory_of(const FileImage& files) {
  DirectoryFiles directory;
  for (const auto& [name, bytes] : files) directory.names.push_back(name);
  const auto format = zarr_format();
  for (const std::string& name : format->index_files(directory.names)) {
    directory.contents.emplace(name, files.at(name));
  }
  for (const std::string& name : format->sized_files(directory.names)) {
    directory.sizes.emplace(name, files.at(name).size());
  }
  return directory;
}

Metadata parse(const FileImage& files) { return zarr_format()->parse_index(directory_of(files)); }

Bytes assemble(const Metadata& metadata, const StoredTensor& tensor, const FileImage& files) {
  const uint64_t size = itemsize(tensor.dtype);
  Bytes whole(static_cast<uint64_t>(numel(tensor.shape)) * size);
  const StridedView target = StridedView::contiguous(whole.data(), tensor.shape, size);
  for (const StoredChunk& chunk : tensor.chunks) {
    const StoredPayload stored = zarr_format()->parse_tensor(tensor, chunk, chunk.at, {});
    Bytes item = files.at(metadata.files[chunk.at.file]);
    if (stored.shape != chunk.box.shape || stored.record_size != item.size()) {
      throw std::logic_error("the sizes of the payload and its chunk differ");
    }
    strided_copy(target.narrow(chunk.box),
                 {item.data() + stored.offset, stored.shape, stored.strides, size});
  }
  return whole;
}

FileImage write(Items items) {
  const auto format = zarr_format();
  format->check(items);
  const auto encoder = format->encoder();
  FileImage files;
  Metadata metadata;
  for (TensorItem& item : items.tensors) {
    item.chunk_shape = grid_of_pieces(item);
    StoredTensor tensor{
        .key = item.key, .path = {}, .dtype = item.dtype, .shape = item.global_shape, .chunks = {}};
    for (const Piece& piece : item.pieces) {
      if (piece.box.empty()) continue;
      files[*format->separate_file(item, piece)] = render(encoder->tensor(item, piece, 0));
      tensor.chunks.push_back({piece.box, {}});
    }
    metadata.tensors.push_back(std::move(tensor));
  }
  for (const ObjectItem& item : items.objects) {
    files[*format->separate_file(item)] = render(encoder->object(item, 0));
    metadata.objects.push_back({item.key, {}, {}});
  }
  metadata.index();
  for (IndexFile& file : format->encode_index(metadata)) files[file.name] = std::move(file.bytes);
  return files;
}

}  // namespace tilestone::zarr
