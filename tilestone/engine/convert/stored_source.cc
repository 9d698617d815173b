#include "tilestone/engine/convert/stored_source_internal.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/engine/read/objects_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/engine/run/progress_internal.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/geometry/box.h"
#include "tilestone/plan/load_plan.h"
#include "tilestone/state/sharded.h"

namespace tilestone::engine {
namespace {

// Elements [begin, end) of the flattened tensor, which are at `data`, C-contiguous.
TensorItem item_of(const StoredTensor& stored, DType dtype, FlatRange range, std::byte* data) {
  TensorItem item;
  item.key = stored.key;
  item.dtype = dtype;
  item.global_shape = stored.shape;
  for (const Box& box : flat_range_to_boxes(stored.shape, range)) {
    item.pieces.push_back({box, TensorView::contiguous(data, dtype, box.shape)});
    data += static_cast<uint64_t>(box.numel()) * itemsize(dtype);
  }
  return item;
}

// It was fetched when it was submitted.
class Fetched final : public DeviceTransfer {
 public:
  void wait() override {}
};

[[noreturn]] void refuse(const DeviceMemory& memory) {
  throw Error(ErrorCode::kInternal, memory.device() + " is only read, and only as a whole");
}

}  // namespace

std::unique_ptr<DeviceTransfer> FetchedMemory::submit(CopyTo to,
                                                      std::span<const DeviceCopy> copies) {
  if (to != CopyTo::kHost) refuse(*this);
  for (const DeviceCopy& copy : copies) {
    static_cast<const FetchedMemory&>(*copy.memory).fetch(copy.begin, copy.host);
  }
  return std::make_unique<Fetched>();
}

std::shared_ptr<DeviceMemory> FetchedMemory::narrow(const Box&) { refuse(*this); }

// One tensor of the source.
class StoredSource::Memory final : public FetchedMemory {
 public:
  Memory(std::shared_ptr<StoredSource> source, size_t asked)
      : source_(std::move(source)), asked_(asked) {}

  std::string device() const override { return "a checkpoint"; }

 private:
  void fetch(uint64_t begin, MutableByteView out) const override {
    source_->fetch(asked_, begin, out);
  }

  const std::shared_ptr<StoredSource> source_;
  const size_t asked_;
};

std::shared_ptr<StoredSource> StoredSource::open(const Location& location,
                                                 const OpenOptions& options) {
  OpenOptions own = options;
  own.resources.buffer_bytes = kBuffers;
  return std::shared_ptr<StoredSource>(new StoredSource(location, own));
}

TensorView StoredSource::tensor(const StoredTensor& stored, DType dtype) {
  TensorItem whole;
  whole.key = stored.key;
  whole.dtype = dtype;
  whole.global_shape = stored.shape;
  whole.pieces.push_back({Box::whole(stored.shape), TensorView::without_data(dtype, stored.shape)});
  const bool cast = dtype != stored.dtype;
  if (patch_ && patch_->supplies(stored)) {
    // Nothing of it is read.
  } else if (states_ && states_->by_parameter().find_tensor(stored.key) == &stored) {
    states_->plan({&whole, 1}, cast);
  } else {
    plan_load({&whole, 1}, metadata(), {.cast = cast});
  }
  TensorView view = TensorView::without_data(dtype, stored.shape);
  const std::lock_guard lock(mutex_);
  asked_.push_back({&stored, dtype, view.bytes()});
  view.device = std::make_shared<Memory>(shared_from_this(), asked_.size() - 1);
  return view;
}

const OptimizerStates& StoredSource::unpack_optimizer(std::vector<OptimizerLayout> layouts) {
  const auto object_of = [this](const StoredObject& stored) {
    return grid_key(stored.key).ends_with(".param_state") ? object_in_place(stored)
                                                          : object(stored);
  };
  return states_.emplace(metadata(), object_of, OptimizerLayouts{std::move(layouts), {}}, nullptr);
}

Value StoredSource::object(const StoredObject& object) const {
  return read_object(context(), opened(), object);
}

Value StoredSource::object_in_place(const StoredObject& object) {
  const std::filesystem::path path =
      std::filesystem::path(open_.storage->describe()) / metadata().files[object.at.file];
  std::error_code error;
  if (object.at.codec != Codec::kNone || !std::filesystem::is_regular_file(path, error)) {
    return this->object(object);
  }
  auto file = std::make_unique<MappedFile>(path);
  const uint64_t size = file->bytes().size();
  if (object.at.offset > size || object.at.length > size - object.at.offset) {
    return this->object(object);  // which reads a copy, or says what is wrong
  }
  const ByteView item = file->bytes().subspan(object.at.offset, object.at.length);
  if (!as_text(item).starts_with("PK")) return this->object(object);  // no archive
  return with_key_and_file(object.key, metadata().files[object.at.file], [&] {
    if (open_.verify_checksums) {
      if (const auto fault = archive::check_archive(item)) {
        throw Error(ErrorCode::kCorrupt,
                    fault->problem + " (at byte " + std::to_string(fault->offset) + ")");
      }
    }
    Value value = opened().dialect->object_of(archive::view_archive(item), *opened().format);
    const std::lock_guard lock(mutex_);
    mapped_.push_back(std::move(file));
    return value;
  });
}

void StoredSource::read(std::span<const TensorItem> items, bool cast) {
  const std::lock_guard lock(mutex_);
  read_now({items.begin(), items.end()}, cast);
}

void StoredSource::read_now(std::vector<TensorItem> items, bool cast) {
  StateReads reads;
  if (states_) {
    reads = states_->reads_of(std::move(items), cast);
  } else {
    reads.items = std::move(items);
  }
  ProgressMeter silent({}, "read", 0);
  const LoadPlan plan = plan_load(reads.items, metadata(), {.cast = cast});
  read_transfers(context(), transfers_of(plan, reads.items, metadata()), silent);
  reads.finish();
}

std::optional<Value> StoredSource::common() const { return read_common(context(), opened()); }

void StoredSource::fetch(size_t asked, uint64_t begin, MutableByteView out) {
  const std::lock_guard lock(mutex_);
  while (!out.empty()) {
    const Part* part = find(asked, begin);
    if (part == nullptr) {
      fill_window(asked, begin);
      part = find(asked, begin);
    }
    const uint64_t size = std::min<uint64_t>(out.size(), part->end - begin);
    std::memcpy(out.data(), window_.data + part->at + (begin - part->begin), size);
    out = out.subspan(size);
    begin += size;
  }
}

const StoredSource::Part* StoredSource::find(size_t asked, uint64_t begin) const {
  const auto found = std::lower_bound(parts_.begin(), parts_.end(), asked,
                                      [](const Part& part, size_t i) { return part.asked < i; });
  if (found == parts_.end() || found->asked != asked) return nullptr;
  return found->begin <= begin && begin < found->end ? &*found : nullptr;
}

// The end of the part of a large tensor that begins at `begin`: as many rows of the first dim as
// fit, because a row is one range in most chunks.
uint64_t StoredSource::end_of_part(const Asked& asked, uint64_t begin) const {
  const uint64_t most = std::min(asked.bytes, begin + kWindow);
  const Dims& shape = asked.stored->shape;
  const uint64_t row = shape.empty() ? 0 : asked.bytes / static_cast<uint64_t>(shape[0]);
  if (most == asked.bytes || row == 0) return most;
  const uint64_t rows_end = most - most % row;
  return rows_end > begin ? rows_end : most - most % itemsize(asked.dtype);
}

// Reads a part of this tensor, or all of it and of the tensors that were asked for after it.
void StoredSource::fill_window(size_t asked, uint64_t begin) {
  if (window_.data == nullptr) {
    window_ = TensorView::allocate(DType::kUInt8, {static_cast<int64_t>(kWindow)});
  }
  parts_.clear();
  std::vector<Part> parts;
  begin -= begin % itemsize(asked_[asked].dtype);
  if (asked_[asked].bytes > kWindow) {
    parts.push_back({asked, begin, end_of_part(asked_[asked], begin), 0});
  } else {
    uint64_t at = 0;
    for (size_t i = asked; i < asked_.size() && asked_[i].bytes <= kWindow - at; ++i) {
      parts.push_back({i, 0, asked_[i].bytes, at});
      at = std::min(kWindow, (at + asked_[i].bytes + 63) / 64 * 64);
    }
  }
  std::vector<TensorItem> items;
  bool cast = false;
  for (const Part& part : parts) {
    const Asked& wanted = asked_[part.asked];
    const StoredTensor& stored = *wanted.stored;
    if (patch_ && patch_->supplies(stored)) continue;
    const auto size = static_cast<int64_t>(itemsize(wanted.dtype));
    const FlatRange range{static_cast<int64_t>(part.begin) / size,
                          static_cast<int64_t>(part.end) / size};
    items.push_back(item_of(stored, wanted.dtype, range, window_.data + part.at));
    cast = cast || wanted.dtype != stored.dtype;
  }
  read_now(std::move(items), cast);
  for (const Part& part : parts) {
    if (patch_ == nullptr) break;
    const MutableByteView elements(window_.data + part.at, part.end - part.begin);
    patch_->apply(*asked_[part.asked].stored, part.begin, elements);
  }
  parts_ = std::move(parts);
}

}  // namespace tilestone::engine
