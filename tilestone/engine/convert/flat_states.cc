#include "tilestone/engine/convert/flat_states_internal.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "tilestone/base/convertible.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/convert_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine {
namespace {

// Distance from the first element of a box to behind its last one in the flat tensor.
int64_t span_of(const Box& box, const Dims& strides) {
  int64_t span = 1;
  for (size_t i = 0; i < strides.size(); ++i) span += (box.shape[i] - 1) * strides[i];
  return span;
}

// Whether the box's elements are consecutive and in order in the flat tensor.
bool in_order(const Box& box, const Dims& strides) {
  const Dims dense = contiguous_strides(box.shape);
  for (size_t i = 0; i < strides.size(); ++i) {
    if (box.shape[i] != 1 && strides[i] != dense[i]) return false;
  }
  return true;
}

// Refuses parts that share elements or leave some out. Parts of equal size at the same place were
// made one before.
void check_parts(const ScatteredTensor& tensor) {
  int64_t held = 0;
  for (const ScatteredPart& part : tensor.parts) held += part.box.numel();
  if (held != numel(tensor.shape)) {
    throw Error(ErrorCode::kCoverage, "the layouts hold " + std::to_string(held) + " of the " +
                                          std::to_string(numel(tensor.shape)) +
                                          " elements of the tensor")
        .with_key(tensor.key)
        .with_hint("give the layouts of all model-parallel ranks of the job that saved");
  }
  // They are sorted by offset. Those that begin at a smaller first index may reach into later ones.
  for (size_t i = 0; i < tensor.parts.size(); ++i) {
    const Box& box = tensor.parts[i].box;
    for (size_t j = i + 1; j < tensor.parts.size(); ++j) {
      const Box& other = tensor.parts[j].box;
      if (box.rank() > 0 && other.offset[0] >= box.end(0)) break;
      if (!intersects(box, other)) continue;
      throw Error(ErrorCode::kCoverage, "two layouts hold the same elements: " + to_string(box) +
                                            " and " + to_string(other))
          .with_key(tensor.key);
    }
  }
}

}  // namespace

// One tensor, in one dtype.
class FlatStates::Memory final : public FetchedMemory {
 public:
  Memory(std::shared_ptr<FlatStates> states, size_t index, DType dtype)
      : states_(std::move(states)), index_(index), dtype_(dtype) {}

  const ScatteredTensor& tensor() const { return states_->tensors_[index_]; }
  DType dtype() const { return dtype_; }

  std::string device() const override { return "the buckets of an optimizer"; }

 private:
  void fetch(uint64_t begin, MutableByteView out) const override {
    states_->fetch(*this, begin, out);
  }

  const std::shared_ptr<FlatStates> states_;
  const size_t index_;
  const DType dtype_;
};

size_t FlatStates::add_stored(const StoredTensor& tensor) {
  flats_.push_back({&tensor, {}, tensor.dtype});
  return flats_.size() - 1;
}

size_t FlatStates::add_view(TensorView tensor) {
  const DType dtype = tensor.dtype;
  flats_.push_back({nullptr, std::move(tensor), dtype});
  return flats_.size() - 1;
}

size_t FlatStates::add_tensor(ScatteredTensor tensor) {
  std::erase_if(tensor.parts, [](const ScatteredPart& part) { return part.box.empty(); });
  std::stable_sort(tensor.parts.begin(), tensor.parts.end(),
                   [](const ScatteredPart& a, const ScatteredPart& b) { return a.box < b.box; });
  const auto same = [](const ScatteredPart& a, const ScatteredPart& b) { return a.box == b.box; };
  tensor.parts.erase(std::unique(tensor.parts.begin(), tensor.parts.end(), same),
                     tensor.parts.end());
  check_parts(tensor);
  if (!tensor.parts.empty()) tensor.dtype = flats_[tensor.parts.front().flat].dtype;
  for (const ScatteredPart& part : tensor.parts) {
    if (dtype(part.flat) == tensor.dtype) continue;
    throw Error(ErrorCode::kMismatch, "its parts are stored as " +
                                          std::string(to_string(tensor.dtype)) + " and as " +
                                          std::string(to_string(dtype(part.flat))))
        .with_key(tensor.key);
  }
  tensors_.push_back(std::move(tensor));
  return tensors_.size() - 1;
}

TensorView FlatStates::tensor(size_t index, DType dtype) {
  const ScatteredTensor& whole = tensors_[index];
  if (!is_convertible(whole.dtype, dtype)) {
    throw Error(ErrorCode::kUnsupported, "elements of " + std::string(to_string(whole.dtype)) +
                                             " can't be converted to " +
                                             std::string(to_string(dtype)))
        .with_key(whole.key);
  }
  TensorView view = TensorView::without_data(dtype, whole.shape);
  view.device = std::make_shared<Memory>(shared_from_this(), index, dtype);
  return view;
}

void FlatStates::read(std::span<const Read> reads) {
  std::map<std::pair<size_t, DType>, TensorItem> wanted;
  bool cast = false;
  for (const Read& read : reads) {
    const Flat& flat = flats_[read.flat];
    const Box range{Dims{read.begin}, read.into.shape};
    if (flat.stored == nullptr) {
      convert(read.into.strided_view(), read.into.dtype, flat.view.narrow(range).strided_view(),
              flat.dtype);
      continue;
    }
    TensorItem& item = wanted[{read.flat, read.into.dtype}];
    item.key = flat.stored->key;
    item.dtype = read.into.dtype;
    item.global_shape = flat.stored->shape;
    item.pieces.push_back({range, read.into});
    cast = cast || item.dtype != flat.dtype;
  }
  std::vector<TensorItem> items;
  for (auto& [place, item] : wanted) items.push_back(std::move(item));
  stored_->read(items, cast);
}

void FlatStates::fetch(const Memory& memory, uint64_t begin, MutableByteView out) {
  const std::lock_guard lock(mutex_);
  while (!out.empty()) {
    if (in_window_ != &memory || begin < window_begin_ || begin >= window_end_) {
      fill_window(memory, begin);
    }
    const uint64_t size = std::min<uint64_t>(out.size(), window_end_ - begin);
    std::memcpy(out.data(), window_.data + (begin - window_begin_), size);
    out = out.subspan(size);
    begin += size;
  }
}

void FlatStates::fill_window(const Memory& memory, uint64_t begin) {
  if (window_.data == nullptr) {
    window_ = TensorView::allocate(DType::kUInt8, {static_cast<int64_t>(kWindow)});
  }
  in_window_ = nullptr;
  const ScatteredTensor& tensor = memory.tensor();
  const auto size = static_cast<int64_t>(itemsize(memory.dtype()));
  const int64_t first = static_cast<int64_t>(begin) / size;
  const int64_t end = std::min(numel(tensor.shape), first + static_cast<int64_t>(kWindow) / size);
  std::vector<Read> reads;
  std::vector<std::pair<StridedView, StridedView>> copies;  // to the window, from other memory
  std::byte* at = window_.data;
  for (const Box& box : flat_range_to_boxes(tensor.shape, {first, end})) {
    const TensorView there = TensorView::contiguous(at, memory.dtype(), box.shape);
    at += there.bytes();
    for (const ScatteredPart& part : tensor.parts) {
      const auto shared = intersect(part.box, box);
      if (!shared) continue;
      int64_t start = part.start;
      for (size_t i = 0; i < part.strides.size(); ++i) {
        start += (shared->offset[i] - part.box.offset[i]) * part.strides[i];
      }
      const int64_t span = span_of(*shared, part.strides);
      const StridedView target = there.strided_view().narrow(relative_to(*shared, box.offset));
      if (target.is_contiguous() && in_order(*shared, part.strides)) {
        reads.push_back(
            {part.flat, start, TensorView::contiguous(target.data, memory.dtype(), Dims{span})});
        continue;
      }
      const TensorView other = TensorView::allocate(memory.dtype(), Dims{span});
      copies.emplace_back(target, StridedView{other.data, shared->shape, part.strides,
                                              static_cast<uint64_t>(size)});
      reads.push_back({part.flat, start, other});
    }
  }
  read(reads);
  for (const auto& [target, source] : copies) strided_copy(target, source);
  in_window_ = &memory;
  window_begin_ = static_cast<uint64_t>(first * size);
  window_end_ = static_cast<uint64_t>(end * size);
}

}  // namespace tilestone::engine
