#include "tilestone/engine/convert/convert.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/convert_source_internal.h"
#include "tilestone/engine/convert/one_file_target_internal.h"
#include "tilestone/engine/convert/selection_internal.h"
#include "tilestone/engine/convert/torch_save_file_internal.h"
#include "tilestone/engine/read/everything_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save/save.h"
#include "tilestone/engine/save/save_steps_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/safetensors/safetensors.h"
#include "tilestone/state/sharded.h"

namespace tilestone {
namespace engine {
namespace {

constexpr std::string_view kSafetensors = "safetensors";
constexpr std::string_view kTorchSave = "torch_save";  // one file; not a format of saves
constexpr std::string_view kTorchCheckpointing = "torch_checkpointing";  // nor is this one

bool is_torch_save_name(const std::string& path) {
  return path.ends_with(".pt") || path.ends_with(".pth");
}
bool is_safetensors_name(const std::string& path) { return path.ends_with(".safetensors"); }

class Conversion {
 public:
  Conversion(ConvertSource source, const std::string& target, const ConvertOptions& options)
      : options_(options), source_(std::move(source)), selected_(select(source_, options)) {
    pick_format(target);
  }

  ConvertResult result() const {
    ConvertResult result;
    result.format = is_torch_checkpointing_ ? kTorchCheckpointing
                    : is_torch_save()       ? kTorchSave
                                            : format_->name();
    result.dialect = dialect_->name();
    result.left_out = selected_.left_out;
    result.has_common = selected_.has_common();
    for (const Chosen& chosen : selected_.chosen) {
      ConvertedKey key{.from = chosen.from, .to = chosen.to, .object = !chosen.is_tensor()};
      if (chosen.is_tensor()) {
        key.from_dtype = chosen.entry->tensor->dtype;
        key.dtype = chosen.dtype;
        key.shape = chosen.entry->tensor->shape;
        const auto file = files_.find(chosen.to);
        if (file != files_.end() && !one_file_) key.file = file->second;
        result.bytes += static_cast<uint64_t>(numel(key.shape)) * itemsize(key.dtype);
      }
      result.keys.push_back(std::move(key));
    }
    return result;
  }

  // Makes the new checkpoint.
  void write(const StateDict& state, const Location& target) const {
    if (is_torch_save()) return write_torch_save(state, target, save_options());
    if (is_torch_checkpointing_) return write_torch_checkpointing(state, target, save_options());
    if (!one_file_) {
      const SaveOptions saving = save_options();
      const RequestView request{&state, &target, &saving, nullptr, 0, format_->name() == "zarr"};
      save_in_a_row({target, saving, deadline_of(saving)}, request);
      return;
    }
    make_one_file(target, [&](const std::shared_ptr<Storage>& directory, const std::string&) {
      const std::string folder = "folder";
      save(state, Location(directory->child(folder)), save_options());
      return folder + "/" + files_.begin()->second;
    });
  }

  StateDict state() {
    if (format_->name() != kSafetensors) return tree(dialect_->name() == kMegatron);
    // The largest elements first, as the package does, so that each tensor is aligned in its file.
    std::vector<const Chosen*> order;
    for (const Chosen& chosen : selected_.chosen) order.push_back(&chosen);
    std::stable_sort(order.begin(), order.end(), [](const Chosen* a, const Chosen* b) {
      return itemsize(a->dtype) > itemsize(b->dtype);
    });
    StateDict state;
    for (const Chosen* chosen : order) {
      if (!is_written_here(*chosen)) continue;
      state.entries().emplace_back(chosen->to, tensor_of(*chosen));
    }
    return state;
  }

  SaveOptions save_options() const {
    SaveOptions options;
    options.format = format_;
    options.dialect = dialect_;
    options.resources = options_.resources;
    options.resources.threads = 1;  // the source is fast if it is read in order
    options.resources.files_per_rank = 1;
    options.timeout = options_.timeout;
    options.progress = options_.progress;
    options.interrupt = options_.interrupt;
    if (const auto& manifest = source_.stored->opened().manifest) {
      options.attributes = manifest->attributes;
    }
    for (const Chosen& chosen : selected_.chosen) {
      const auto found = source_.metadata().attributes.find(chosen.from);
      if (found == source_.metadata().attributes.end() || !is_written_here(chosen)) continue;
      options.tensor_attributes.emplace(chosen.to, found->second);
    }
    return options;
  }

  // What a save checks first, for a conversion that does not save.
  void check(const StateDict& state) const {
    if (is_torch_save() || is_torch_checkpointing_) return check_torch_save(state);
    format_->check(dialect_->to_items(state, *format_));
  }

  void expect_together() const {
    if (format_->name() == kSafetensors && !one_file_ && !options_.dry_run) return;
    throw Error(ErrorCode::kInvalidArgument,
                "several ranks convert together only into a folder of safetensors");
  }

 private:
  // The ranks take the files in turn.
  bool is_written_here(const Chosen& chosen) const {
    if (options_.comm.size() == 1) return true;
    const auto at = std::find(file_names_.begin(), file_names_.end(), files_.at(chosen.to));
    return (at - file_names_.begin()) % options_.comm.size() == options_.comm.rank();
  }

  TensorView tensor_of(const Chosen& chosen) const {
    return source_.stored->tensor(*chosen.entry->tensor, chosen.dtype);
  }
  Value object_of(const Chosen& chosen) const {
    return source_.stored->object(*chosen.entry->object);
  }

  bool is_torch_save() const { return one_file_ && format_->name() != kSafetensors; }

  // `target`: the path of the new checkpoint.
  void pick_format(const std::string& target) {
    std::string name = options_.format;
    if (name.empty() && is_torch_save_name(target)) name = kTorchSave;
    if (name.empty() && is_safetensors_name(target)) name = kSafetensors;
    if (name.empty()) {
      const auto saved = known_formats();
      const bool is_saved = std::any_of(saved.begin(), saved.end(), [&](const auto& format) {
        return format->name() == source_.format();
      });
      name = is_saved ? kSafetensors : "torch_dist";
    }
    if (name == kSafetensors) return pick_safetensors(is_safetensors_name(target));
    if (options_.shard_bytes > 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  "shard_size is only for safetensors, but the new checkpoint is in " + name);
    }
    one_file_ = name == kTorchSave;
    is_torch_checkpointing_ = name == kTorchCheckpointing;
    const bool is_other = one_file_ || is_torch_checkpointing_;
    if (is_other && !options_.dialect.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  one_file_ ? "files of torch.save have no dialect"
                            : "folders of torch_checkpointing have no dialect");
    }
    if (is_other) {
      format_ = format_named("torch_dist");  // the tree is the same
      dialect_ = pytorch_dialect();
      return;
    }
    for (const auto& format : known_formats()) {
      if (format->name() == name) format_ = format;
    }
    if (format_ == nullptr) {
      throw Error(ErrorCode::kUnsupported, "unknown format \"" + name + "\"")
          .with_hint("use one of: torch_dist, zarr, safetensors, torch_checkpointing, torch_save");
    }
    dialect_ =
        dialect_named(options_.dialect.empty() ? std::string(source_.dialect()) : options_.dialect);
  }

  void pick_safetensors(bool one_file) {
    one_file_ = one_file;
    if (one_file_ && options_.shard_bytes > 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  "shard_size makes several files, but the target's name is that of one file")
          .with_hint("name a directory, which does not end with .safetensors");
    }
    check_for_safetensors();
    if (one_file_ && selected_.chosen.empty()) {
      throw Error(ErrorCode::kInvalidArgument, "no tensor is selected, so the file would be empty")
          .with_hint("`tilestone ls` lists the keys");
    }
    std::vector<SafetensorsTensor> tensors;
    for (const Chosen& chosen : selected_.chosen) {
      const uint64_t elements = static_cast<uint64_t>(numel(chosen.entry->tensor->shape));
      tensors.push_back(
          {chosen.to, elements * itemsize(chosen.dtype),
           safetensors_header_bytes(chosen.to, chosen.dtype, chosen.entry->tensor->shape)});
    }
    if (options_.files.empty() && options_.other_file.empty()) {
      files_ =
          safetensors_files(tensors, options_.shard_bytes > 0 ? options_.shard_bytes : UINT64_MAX);
    } else {
      take_named_files(tensors);
    }
    std::set<std::string> names;
    for (const auto& [key, file] : files_) names.insert(file);
    file_names_.assign(names.begin(), names.end());
    if (one_file_ && files_.begin()->second != files_.rbegin()->second) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the keys of all tensors are too long for the header of one safetensors file")
          .with_hint("name a directory, which does not end with .safetensors, and gets several");
    }
    format_ = safetensors_writer({.files = files_});
    dialect_ = pytorch_dialect();
  }

  void take_named_files(const std::vector<SafetensorsTensor>& tensors) {
    for (const SafetensorsTensor& tensor : tensors) {
      const auto named = options_.files.find(tensor.key);
      files_[tensor.key] = named == options_.files.end() ? options_.other_file : named->second;
      if (!files_[tensor.key].empty()) continue;
      throw Error(ErrorCode::kInvalidArgument, "no file is named for the tensor")
          .with_key(tensor.key);
    }
  }

  void check_for_safetensors() const {
    constexpr const char* kHint =
        "convert only the tensors: `--only model`, or `--keys` with their patterns";
    if (!options_.dialect.empty() && options_.dialect != pytorch_dialect()->name()) {
      throw Error(ErrorCode::kInvalidArgument, "safetensors files have no dialect");
    }
    if (selected_.has_common()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "safetensors can't hold the common state of Megatron-Core, only tensors")
          .with_key(to_string(selected_.common->as_dict().front().first))
          .with_hint(kHint);
    }
    if (!selected_.empty_dicts.empty()) {
      throw Error(ErrorCode::kInvalidArgument, "safetensors can't hold an empty dict, only tensors")
          .with_key(selected_.empty_dicts.front())
          .with_hint(kHint);
    }
    for (const Chosen& chosen : selected_.chosen) {
      if (!chosen.is_tensor()) {
        throw Error(ErrorCode::kInvalidArgument, "safetensors can't hold objects, only tensors")
            .with_key(chosen.from)
            .with_hint(kHint);
      }
      check_safetensors(chosen.to, chosen.dtype, chosen.entry->tensor->shape);
    }
  }

  // An object of a grid under its new key; nullopt: it is an ordinary object.
  std::optional<ShardedObject> as_sharded(const Chosen& chosen) const {
    const std::string_view grid = grid_key(chosen.to);
    if (grid == chosen.to) return std::nullopt;
    const std::string_view cell = std::string_view(chosen.to).substr(grid.size() + 7);  // "/shard_"
    const size_t between = cell.find('_');
    return ShardedObject::make(std::string(grid), object_of(chosen),
                               numbers(cell.substr(between + 1)), numbers(cell.substr(0, between)));
  }
  static Dims numbers(std::string_view text) {
    Dims found;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find('.', begin), text.size());
      found.push_back(std::stoll(std::string(text.substr(begin, end - begin))));
      begin = end + 1;
    }
    return found;
  }

  // Entities with keys of their own, below a name that the state does not use, which leaves no
  // trace in a checkpoint.
  static void add_entities(StateDict& state, StateDict entities) {
    if (entities.empty()) return;
    std::string name = "entities";
    while (state.find(PathElement(name)) != nullptr) name += '_';
    state[name] = std::move(entities);
  }

  // In the order in which the new tree has them, which is also that of the reads.
  std::vector<const Chosen*> in_order() const {
    std::vector<const Chosen*> order;
    for (const Chosen& chosen : selected_.chosen) order.push_back(&chosen);
    std::stable_sort(order.begin(), order.end(), [](const Chosen* a, const Chosen* b) {
      return a->entry->order() < b->entry->order();
    });
    return order;
  }

  // The state to save. In Megatron-Core's dialect, tensors are wrapped, because everything else
  // would be common state.
  StateDict tree(bool wraps) {
    Items items;
    items.dict_keys = selected_.dict_keys;
    items.common = selected_.common;
    StateDict entities;
    for (const Chosen* const chosen : in_order()) {
      if (chosen->is_tensor()) {
        TensorView view = tensor_of(*chosen);
        const Box whole = Box::whole(view.shape);
        if (wraps) {
          entities[chosen->to] = ShardedTensor::from_box(chosen->to, view, view.shape, whole);
          continue;
        }
        TensorItem item;
        item.key = chosen->to;
        item.path = chosen->path;
        item.order = chosen->entry->order();
        item.pieces.push_back({whole, std::move(view)});
        items.tensors.push_back(std::move(item));
      } else if (auto sharded = as_sharded(*chosen)) {
        entities[chosen->to] = *std::move(sharded);
      } else {
        ObjectItem item;
        item.key = chosen->to;
        item.path = chosen->path;
        item.order = chosen->entry->order();
        item.value = object_of(*chosen);
        items.objects.push_back(std::move(item));
      }
    }
    StateDict state = tree_of(std::move(items));
    if (source_.dialect() != kMegatron) expect_places(state, entities);
    add_entities(state, std::move(entities));
    return state;
  }

  // In Megatron-Core's dialect an entity has no path: a load without a template puts it at the top,
  // under its key. A checkpoint of another dialect may have something else there: {"a.b": {}}
  // beside {"a": {"b": tensor}}.
  void expect_places(const StateDict& common, const StateDict& entities) const {
    for (const auto& [key, entity] : entities.entries()) {
      if (common.find(key) == nullptr) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  "in Megatron-Core's dialect a tensor and a dict of the common state would have "
                  "this key, so that nothing could load the checkpoint without a template")
          .with_key(key_text(key))
          .with_hint("rename one of them (`--rename`), or leave it out (`--keys`)");
    }
  }

  const ConvertOptions& options_;
  const ConvertSource source_;
  const Selection selected_;
  bool one_file_ = false;  // of torch.save or safetensors
  bool is_torch_checkpointing_ = false;
  std::shared_ptr<const Format> format_;
  std::shared_ptr<const Dialect> dialect_;
  std::map<std::string, std::string, std::less<>> files_;  // safetensors: key -> file
  std::vector<std::string> file_names_;                    // sorted
};

// What a rank has failed with before the ranks meet is its first message to the others.
ConvertResult convert_together(const Location& source, const Location& target,
                               const ConvertOptions& options) {
  std::optional<Conversion> conversion;
  StateDict state;
  SaveOptions saving;
  std::optional<Error> failed;
  try {
    expect_apart(source, target);
    conversion.emplace(open_source(source, options), target.describe(), options);
    conversion->expect_together();
    state = conversion->state();
    saving = conversion->save_options();
  } catch (...) {
    failed = current_error();
    saving.timeout = options.timeout;
  }
  saving.comm = options.comm;
  const MadeRequest request =
      failed ? MadeRequest(*failed) : MadeRequest(RequestView{&state, &target, &saving});
  save_in_a_row({target, saving, deadline_of(saving)}, request);
  return conversion->result();
}

}  // namespace

ConvertResult convert(ConvertSource source, const Location& target, const ConvertOptions& options) {
  const auto began = std::chrono::steady_clock::now();
  Conversion conversion(std::move(source), target.describe(), options);
  ConvertResult result = conversion.result();
  const StateDict state = conversion.state();
  if (options.dry_run) {
    conversion.check(state);
  } else {
    conversion.write(state, target);
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return result;
}

}  // namespace engine

ConvertResult convert(const Location& source, const Location& target,
                      const ConvertOptions& options) {
  try {
    if (options.comm.size() > 1) return engine::convert_together(source, target, options);
    engine::expect_apart(source, target);
    return engine::convert(engine::open_source(source, options), target, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) rethrow_cause();
    throw Error(error.code(), error.message())  // a save's hint names overwrite
        .with_hint("convert to another name, or remove what is there first");
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
