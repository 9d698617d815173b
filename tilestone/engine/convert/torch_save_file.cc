#include "tilestone/engine/convert/torch_save_file_internal.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/convert/one_file_target_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/write/fetch_ahead_internal.h"
#include "tilestone/engine/write/stream_internal.h"
#include "tilestone/format/archive/archive_writer_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/archive/zip_writer_internal.h"
#include "tilestone/format/torch_checkpointing/torch_checkpointing.h"

namespace tilestone::engine {
namespace {

// The state as one value. A value can't hold a tensor in memory that must be fetched, so each
// tensor is stood in for by a view of the same dtype and shape without usable memory, which owns
// the real one.
class AsValue {
 public:
  Value of(const StateNode& node, const std::string& key) {
    if (const auto* value = node.get_if<Value>()) return whole(*value, key);
    if (const auto* tensor = node.get_if<TensorView>()) return stand_in(*tensor);
    if (const auto* object = node.get_if<ShardedObject>()) return whole(object->data, key);
    if (const auto* dict = node.get_if<StateDict>()) return of(*dict, key);
    if (const auto* list = node.get_if<StateList>()) {
      Value::List items;
      for (const StateNode& item : *list) items.push_back(of(item, key));
      return Value::list(std::move(items));
    }
    throw Error(ErrorCode::kInternal, "a state for torch.save holds something else").with_key(key);
  }
  Value of(const StateDict& dict, const std::string& key) {
    Value::Dict items;
    for (const auto& [name, node] : dict.entries()) {
      const std::string text = key_text(name);
      const auto original = dict.original_keys().find(text);
      items.emplace_back(original != dict.original_keys().end()
                             ? original->second
                             : std::visit([](const auto& element) { return Value(element); }, name),
                         of(node, key.empty() ? text : key + "." + text));
    }
    for (const auto& [name, value] : dict.others()) items.emplace_back(name, value);
    return Value::dict(std::move(items));
  }

  // The tensor that a view of the value stands in for. A tensor inside a value stands for itself.
  const TensorView& real(const TensorView& view) const {
    const void* const owner = view.owner.get();
    return stand_ins_.contains(owner) ? *static_cast<const TensorView*>(owner) : view;
  }

 private:
  static Value whole(const Value& value, const std::string& key) {
    if (value.kind() != Value::Kind::kPickled) return value;
    const Pickled& pickled = value.as_pickled();
    return with_key(key, [&] {
      return pickled.archive ? read_torch_archive(pickled.bytes) : read_pickle(pickled.bytes);
    });
  }

  Value stand_in(const TensorView& tensor) {
    static std::byte nothing{};
    TensorView view = TensorView::without_data(tensor.dtype, tensor.shape);
    view.data = &nothing;
    view.strides = contiguous_strides(tensor.shape);
    view.owner = std::make_shared<const TensorView>(tensor);
    stand_ins_.insert(view.owner.get());
    return view;
  }

  std::unordered_set<const void*> stand_ins_;
};

class Writer {
 public:
  Writer(WritableFile& file, StreamContext& context, FetchAhead fetched)
      : stream_(file, context, std::move(fetched)) {}

  void record(const std::string& name, ByteView data) {
    zip_.begin(name, data.size());
    put_bytes();
    zip_.end(stream_.write(data));
  }
  void record(const std::string& name, const TensorView& tensor) {
    zip_.begin(name, tensor.bytes());
    put_bytes();
    ItemRecipe recipe;
    recipe.length = tensor.bytes();
    recipe.segments.push_back(
        {.size = recipe.length, .literal = nullptr, .tensor = &tensor, .padding = nullptr});
    zip_.end(stream_.write(recipe).payload_crc32);
  }
  void finish() {
    zip_.finish();
    put_bytes();
    stream_.finish();
  }

 private:
  void put_bytes() { stream_.write(ByteView(zip_.take())); }

  FileStream stream_;
  archive::ZipWriter zip_;
};

// A file to be written.
struct ArchiveFile {
  std::string name;
  archive::PickledValue pickled;
};

// The tensors in memory that must be fetched, in the order of writing.
FetchAhead on_devices(const archive::PickledValue& pickled, const AsValue& as_value,
                      const SaveOptions& options, const Deadline& deadline) {
  static const std::string what = "tensors of the file";
  std::vector<FetchedTensor> fetched;
  uint64_t bytes = 0;
  for (const TensorView& view : pickled.tensors) {
    const TensorView& tensor = as_value.real(view);
    if (tensor.device == nullptr || tensor.bytes() == 0) continue;
    bytes += tensor.bytes();
    fetched.push_back({&tensor, &what});
  }
  std::shared_ptr<BufferPool> buffers;
  if (!fetched.empty()) {
    buffers = make_pinned_pool(options.resources.buffer_bytes, 1, FetchAhead::kPerStream, bytes,
                               *fetched.back().tensor->device);
  }
  return {std::move(fetched), std::move(buffers), deadline};
}

uint64_t archive_bytes(const archive::PickledValue& pickled) {
  uint64_t bytes = 0;
  for (const TensorView& tensor : pickled.tensors) bytes += tensor.bytes();
  return bytes;
}

void write_archive(Storage& directory, const ArchiveFile& made, const AsValue& as_value,
                   StreamContext& context, const SaveOptions& options) {
  const archive::PickledValue& pickled = made.pickled;
  const auto file = directory.create(made.name, archive_bytes(pickled) + pickled.pickle.size());
  Writer writer(*file, context, on_devices(pickled, as_value, options, context.deadline));
  writer.record("archive/data.pkl", ByteView(pickled.pickle));
  writer.record("archive/byteorder", as_bytes("little"));
  writer.record("archive/version", as_bytes("3\n"));
  for (size_t i = 0; i < pickled.tensors.size(); ++i) {
    writer.record("archive/data/" + std::to_string(i), as_value.real(pickled.tensors[i]));
  }
  writer.finish();
  file->sync(context.deadline);
  file->close();
}

void write_archives(Storage& directory, std::span<const ArchiveFile> files, const AsValue& as_value,
                    const SaveOptions& options) {
  uint64_t bytes = 0;
  for (const ArchiveFile& file : files) bytes += archive_bytes(file.pickled);
  ProgressMeter progress(options.progress, "write", bytes);
  StreamContext context;
  context.buffers = make_pool(options.resources.buffer_bytes, 1, bytes);
  context.progress = &progress;
  context.deadline = deadline_of(options);
  for (const ArchiveFile& file : files) {
    write_archive(directory, file, as_value, context, options);
  }
  progress.finish();
}

// The state as items of torch_checkpointing. One with keys that can't be names of items is one
// item.
Value items_of_folder(Value state) {
  const Value::Dict& entries = state.as_dict();
  const bool are_items = std::ranges::all_of(entries, [](const auto& entry) {
    return entry.first.kind() == Value::Kind::kString &&
           is_torch_checkpointing_item(entry.first.as_string());
  });
  return are_items && !entries.empty() ? state : Value::dict({{"model", std::move(state)}});
}

}  // namespace

void check_torch_save(const StateDict& state) {
  AsValue as_value;
  archive::pickle_value(as_value.of(state, ""));
}

void write_torch_save(const StateDict& state, const Location& location,
                      const SaveOptions& options) {
  check_options(options);
  AsValue as_value;
  ArchiveFile file{"", archive::pickle_value(as_value.of(state, ""))};
  make_one_file(location, [&](const std::shared_ptr<Storage>& directory, const std::string& name) {
    file.name = name;
    write_archives(*directory, {&file, 1}, as_value, options);
    return name;
  });
}

void write_torch_checkpointing(const StateDict& state, const Location& location,
                               const SaveOptions& options) {
  check_options(options);
  AsValue as_value;
  const Value items = items_of_folder(as_value.of(state, ""));
  std::vector<ArchiveFile> files;
  for (const auto& [name, item] : items.as_dict()) {
    files.push_back({torch_checkpointing_file(name.as_string()), archive::pickle_value(item)});
  }
  const Bytes index = archive::pickle_value(torch_checkpointing_index(items)).pickle;
  make_folder(location, [&](const std::shared_ptr<Storage>& directory, const std::string&) {
    const std::string name = "folder";
    const std::shared_ptr<Storage> folder = directory->child(name);
    write_archives(*folder, files, as_value, options);
    folder->make_file(std::string(kTorchCheckpointingIndex), index, Deadline::never());
    folder->settle("");
    return name;
  });
}

}  // namespace tilestone::engine
