#include "tilestone/engine/convert_source_internal.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string_view>
#include <utility>

#include "tilestone/base/convertible.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/convert_optimizer_internal.h"
#include "tilestone/engine/read/convert_internal.h"
#include "tilestone/engine/stored_source_internal.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/storage/mapped_file.h"

namespace tilestone::engine {
namespace {

// A layout is given for nothing else.
bool converts_optimizer(const ConvertOptions& options) {
  if (!options.optimizer.empty() && options.optimizer != "fully_reshardable") {
    throw Error(ErrorCode::kInvalidArgument,
                "an optimizer's state can't be converted to \"" + options.optimizer + "\"")
        .with_hint("the only format is fully_reshardable");
  }
  return !options.optimizer.empty() || !options.layout_file.empty();
}

OpenOptions opening(const ConvertOptions& options) {
  OpenOptions open;
  open.reading = options.reading;
  open.checks = options.checks;
  open.resources.threads = options.resources.threads;
  open.interrupt = options.interrupt;
  return open;
}

ConvertSource of_checkpoint(const Location& location, const ConvertOptions& options) {
  const auto stored = StoredSource::open(location, opening(options));
  const Metadata& metadata = stored->metadata();
  ConvertSource source;
  source.format = stored->opened().format->name();
  source.dialect = stored->opened().dialect->name();
  for (uint32_t i = 0; i < metadata.tensors.size(); ++i) {
    const StoredTensor& tensor = metadata.tensors[i];
    source.entries.push_back({.key = tensor.key,
                              .path = tensor.path,
                              .dtype = tensor.dtype,
                              .shape = tensor.shape,
                              .tensor = [=](DType dtype) { return stored->tensor(i, dtype); },
                              .object = nullptr});
  }
  for (const StoredObject& object : metadata.objects) {
    source.entries.push_back({.key = object.key,
                              .path = object.path,
                              .dtype = {},
                              .shape = {},
                              .tensor = nullptr,
                              .object = [=, &object] { return stored->object(object); }});
  }
  source.common = stored->common();
  source.dict_keys = metadata.dict_keys;
  source.tensor_attributes = metadata.attributes;
  if (const auto& manifest = stored->opened().manifest) source.attributes = manifest->attributes;
  if (converts_optimizer(options)) make_fully_reshardable(source, stored, options.layout_file);
  return source;
}

// ---- Files of torch.save

bool is_archive_file(const std::string& path) {
  constexpr std::string_view kEndings[] = {".pt", ".pth", ".bin", ".ckpt"};
  std::error_code error;
  return std::any_of(std::begin(kEndings), std::end(kEndings),
                     [&](std::string_view ending) { return path.ends_with(ending); }) &&
         std::filesystem::is_regular_file(path, error);
}

// A tensor in memory, converted as it is read.
class Converted final : public DeviceMemory {
 public:
  Converted(TensorView tensor, DType dtype, std::shared_ptr<const void> owner)
      : tensor_(std::move(tensor)), dtype_(dtype), owner_(std::move(owner)) {}

  std::string device() const override { return "a file"; }
  std::unique_ptr<DeviceTransfer> submit(CopyTo to, std::span<const DeviceCopy> copies) override {
    if (to != CopyTo::kHost) refuse();
    for (const DeviceCopy& copy : copies) {
      static_cast<const Converted&>(*copy.memory).convert_range(copy.begin, copy.host);
    }
    return std::make_unique<Done>();
  }
  std::shared_ptr<DeviceMemory> narrow(const Box&) override { refuse(); }

 private:
  // It was converted when it was submitted.
  class Done final : public DeviceTransfer {
   public:
    void wait() override {}
  };

  // Whole elements are converted; one that is only partly wanted is converted each time.
  void convert_range(uint64_t begin, MutableByteView out) const {
    const uint64_t from = itemsize(tensor_.dtype), to = itemsize(dtype_);
    const uint64_t first = begin / to, end = (begin + out.size() + to - 1) / to;
    Bytes raw((end - first) * from), made((end - first) * to);
    pack_range(tensor_.strided_view(), first * from, raw);
    const Dims shape{static_cast<int64_t>(end - first)};
    convert(StridedView::contiguous(made.data(), shape, to), dtype_,
            StridedView::contiguous(raw.data(), shape, from), tensor_.dtype);
    const auto at = made.begin() + static_cast<ptrdiff_t>(begin - first * to);
    std::copy(at, at + static_cast<ptrdiff_t>(out.size()), out.begin());
  }

  [[noreturn]] static void refuse() {
    throw Error(ErrorCode::kInternal, "a tensor of a file is only read, and only as a whole");
  }

  const TensorView tensor_;
  const DType dtype_;
  const std::shared_ptr<const void> owner_;
};

TensorView as_dtype(const TensorView& tensor, DType dtype, const std::string& key,
                    const std::shared_ptr<const void>& owner) {
  if (tensor.dtype == dtype) {
    TensorView same = tensor;
    same.owner = owner;
    return same;
  }
  if (!is_convertible(tensor.dtype, dtype)) {
    throw Error(ErrorCode::kUnsupported, "elements of " + std::string(to_string(tensor.dtype)) +
                                             " can't be converted to " +
                                             std::string(to_string(dtype)))
        .with_key(key);
  }
  TensorView view = TensorView::without_data(dtype, tensor.shape);
  view.device = std::make_shared<Converted>(tensor, dtype, owner);
  return view;
}

// The entries of the file's dict, or the file's object as the only one.
StateDict tree_of_file(const Value& root) {
  StateDict state;
  if (root.kind() != Value::Kind::kDict) {
    state["object"] = root;
    return state;
  }
  for (const auto& [key, value] : root.as_dict()) {
    if (key.kind() == Value::Kind::kString) {
      state.entries().emplace_back(key.as_string(), value);
    } else if (key.kind() == Value::Kind::kInt) {
      state.entries().emplace_back(key.as_int(), value);
    } else {
      state.others().emplace_back(key, value);
    }
  }
  return state;
}

ConvertSource of_archive(const std::string& path) {
  struct Kept {
    explicit Kept(const std::string& file) : mapped(file) {}
    MappedFile mapped;
    Items items;
  };
  const auto kept = std::make_shared<Kept>(path);
  try {
    if (const auto fault = archive::check_archive(kept->mapped.bytes())) {
      throw Error(ErrorCode::kCorrupt,
                  fault->problem + " (at byte " + std::to_string(fault->offset) + ")");
    }
    const StateDict state = tree_of_file(archive::view_archive(kept->mapped.bytes()));
    kept->items = pytorch_dialect()->to_items(state, *torch_dist_format());
  } catch (Error& error) {
    error.with_file(path);
    throw;
  }
  ConvertSource source;
  source.format = "torch_save";
  source.dialect = pytorch_dialect()->name();
  source.dict_keys = kept->items.dict_keys;
  for (const TensorItem& item : kept->items.tensors) {
    source.entries.push_back({.key = item.key,
                              .path = item.path,
                              .dtype = item.dtype,
                              .shape = item.global_shape,
                              .tensor =
                                  [kept, &item](DType dtype) {
                                    return as_dtype(item.pieces[0].data, dtype, item.key, kept);
                                  },
                              .object = nullptr});
  }
  for (const ObjectItem& item : kept->items.objects) {
    source.entries.push_back({.key = item.key,
                              .path = item.path,
                              .dtype = {},
                              .shape = {},
                              .tensor = nullptr,
                              .object = [kept, &item] { return item.value; }});
  }
  return source;
}

}  // namespace

ConvertSource open_source(const Location& location, const ConvertOptions& options) {
  const std::string path = location.describe();
  if (is_archive_file(path) && converts_optimizer(options)) {
    throw Error(ErrorCode::kInvalidArgument,
                "a file of torch.save does not hold the buckets of a distributed optimizer")
        .with_file(path);
  }
  return is_archive_file(path) ? of_archive(path) : of_checkpoint(location, options);
}

}  // namespace tilestone::engine
