#include "tilestone/format/torch_dist/checkpoint_testing.h"

#include <algorithm>
#include <utility>

#include "tilestone/format/data_file_name.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format_testing.h"

namespace tilestone::torch_dist {

namespace {

class CheckpointWriter {
 public:
  CheckpointWriter(const Format& format, const std::string& save_id) : format_(format) {
    metadata_.files = {data_file_name(save_id, 0, 0)};
    metadata_.save_id = save_id;
  }

  void add(const TensorItem& item) {
    auto tensor = std::find_if(metadata_.tensors.begin(), metadata_.tensors.end(),
                               [&](const StoredTensor& known) { return known.key == item.key; });
    if (tensor == metadata_.tensors.end()) {
      tensor = metadata_.tensors.insert(tensor,
                                        {item.key, item.path, item.dtype, item.global_shape, {}});
    }
    for (const Piece& piece : item.pieces) {
      tensor->chunks.push_back({piece.box, append(encoder_->tensor(item, piece, data_.size()))});
    }
  }
  void add(const ObjectItem& item) {
    const ItemLocation at = append(encoder_->object(item, data_.size()));
    metadata_.objects.push_back({item.key, item.path, at});
  }

  FileImage finish() && {
    metadata_.index();
    FileImage files;
    for (IndexFile& file : format_.encode_index(metadata_)) {
      files.emplace(file.name, std::move(file.bytes));
    }
    files.emplace(metadata_.files[0], std::move(data_));
    return files;
  }

 private:
  ItemLocation append(const ItemRecipe& recipe) {
    const Bytes bytes = render(recipe);
    const ItemLocation at{0, Codec::kNone, data_.size() + recipe.padding, recipe.length, {}};
    data_.insert(data_.end(), bytes.begin(), bytes.end());
    return at;
  }

  const Format& format_;
  const std::unique_ptr<ItemEncoder> encoder_ = format_.encoder();
  Metadata metadata_;
  Bytes data_;
};

}  // namespace

DirectoryFiles directory_of(const FileImage& files) {
  DirectoryFiles directory;
  directory.contents = files;
  for (const auto& [name, bytes] : files) {
    directory.names.push_back(name);
    directory.sizes.emplace(name, bytes.size());
  }
  return directory;
}

Metadata parse(const Format& format, const FileImage& files) {
  return format.parse_index(directory_of(files));
}

FileImage write_checkpoint(const Format& format, const StateDict& state,
                           const std::string& save_id) {
  CheckpointWriter writer(format, save_id);
  const Items items = pytorch_dialect()->to_items(state, format);
  for (const ObjectItem& item : items.objects) writer.add(item);
  for (const TensorItem& item : items.tensors) writer.add(item);
  return std::move(writer).finish();
}

}  // namespace tilestone::torch_dist
