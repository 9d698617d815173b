// Order the dims of size greater than 1 by stride, largest first: d(0), ..., d(k-1). The inner span
// S(i) is the number of bytes over which the elements along d(i), ..., d(k-1) extend, at one index
// of the outer dims:
//     S(k) = itemsize,   S(i) = (n(i) - 1) * step(i) + S(i + 1).
// Dim i can be joined when the gap step(i) - S(i + 1) is small enough. The innermost run of dims
// that can all be joined, from i on, is a block. If S(i) fits the limit, the block is read as one
// range. Otherwise it is cut along d(i) into groups of as many indices as fit, or, if not even one
// index fits, along the next dim. Dims outside the block are walked index by index.
#include "tilestone/engine/read/parts_internal.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/plan/exchange_plan.h"

namespace tilestone::engine {
namespace {

struct PartAxis {
  size_t dim = 0;
  uint64_t count = 0;
  uint64_t step = 0;  // bytes
};

bool can_join(uint64_t step, uint64_t inner_span) {
  return step <= inner_span || step <= kJoinedStep || step - inner_span <= inner_span / kSpareShare;
}

std::vector<PartAxis> ordered_axes(const StoredPayload& payload, const Dims& shape) {
  std::vector<PartAxis> axes;
  const uint64_t size = itemsize(payload.dtype);
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (shape[dim] == 1) continue;
    axes.push_back({dim, static_cast<uint64_t>(shape[dim]),
                    static_cast<uint64_t>(payload.strides[dim]) * size});
  }
  std::stable_sort(axes.begin(), axes.end(),
                   [](const PartAxis& a, const PartAxis& b) { return a.step > b.step; });
  return axes;
}

// spans[i] is S(i).
std::vector<uint64_t> inner_spans(const std::vector<PartAxis>& axes, uint64_t itemsize) {
  std::vector<uint64_t> spans(axes.size() + 1, itemsize);
  for (size_t i = axes.size(); i-- > 0;) {
    spans[i] = (axes[i].count - 1) * axes[i].step + spans[i + 1];
  }
  return spans;
}

// How a box is cut: axes before `block` are walked index by index, the block's first axis in groups
// of `group` indices.
struct PartCut {
  size_t block = 0;
  uint64_t group = 1;
};

PartCut find_cut(const std::vector<PartAxis>& axes, const std::vector<uint64_t>& spans,
                 uint64_t max_bytes) {
  size_t block = axes.size();
  while (block > 0 && can_join(axes[block - 1].step, spans[block])) --block;
  while (block < axes.size() && spans[block] > max_bytes && spans[block + 1] > max_bytes) ++block;
  if (block == axes.size()) return {block, 1};
  if (spans[block] <= max_bytes) return {block, axes[block].count};
  return {block, (max_bytes - spans[block + 1]) / axes[block].step + 1};
}

[[noreturn]] void fail(const StoredPayload& payload, const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "a stored tensor of shape " + to_string(payload.shape) +
                                       " and strides " + to_string(payload.strides) + " " +
                                       problem);
}

}  // namespace

void check_payload(const StoredPayload& payload, uint64_t limit) {
  if (payload.strides.size() != payload.shape.size()) {
    fail(payload, "has a different number of dims and strides");
  }
  std::optional<uint64_t> last = 0;
  bool empty = false;
  for (size_t d = 0; d < payload.shape.size(); ++d) {
    if (payload.shape[d] < 0 || payload.strides[d] < 0) {
      fail(payload, "has a negative size or stride");
    }
    if (payload.shape[d] == 0) empty = true;
    if (payload.shape[d] <= 1) continue;
    const auto reach = try_mul(static_cast<uint64_t>(payload.shape[d] - 1),
                               static_cast<uint64_t>(payload.strides[d]));
    last = last && reach ? try_add(*last, *reach) : std::nullopt;
  }
  if (empty) return;
  const uint64_t size = itemsize(payload.dtype);
  std::optional<uint64_t> end = last ? try_add(*last, uint64_t{1}) : std::nullopt;
  end = end ? try_mul(*end, size) : std::nullopt;
  end = end ? try_add(*end, payload.offset) : std::nullopt;
  if (!end || *end > limit) {
    fail(payload, "reaches beyond its item of " + std::to_string(limit) + " bytes");
  }
}

bool fills_record(const StoredPayload& payload) {
  if (payload.offset != payload.record_offset) return false;
  const uint64_t size = itemsize(payload.dtype);
  const StridedView whole{nullptr, payload.shape, payload.strides, size};
  if (whole.is_contiguous()) return whole.bytes() == payload.record_size;
  const std::vector<PartAxis> axes = ordered_axes(payload, payload.shape);
  const std::vector<uint64_t> spans = inner_spans(axes, size);
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].step != spans[i + 1]) return false;
  }
  return spans.front() == payload.record_size;
}

bool fills_record(const StoredChunk& chunk, const StoredPayload& payload) {
  if (!chunk.flat) return fills_record(payload);
  const uint64_t size = itemsize(payload.dtype);
  return StridedView{nullptr, payload.shape, payload.strides, size}.is_contiguous() &&
         payload.offset == payload.record_offset + begin_in_item(chunk, payload.dtype) &&
         payload.record_size == static_cast<uint64_t>(chunk.flat->elements) * size;
}

void split(const StoredPayload& payload, const Box& box, uint64_t max_bytes,
           const std::function<void(Part)>& emit) {
  if (box.empty()) return;
  const uint64_t size = itemsize(payload.dtype);
  const StridedView whole{nullptr, payload.shape, payload.strides, size};
  if (box.shape == payload.shape && whole.bytes() <= max_bytes && whole.is_contiguous()) {
    return emit({box, payload.offset, whole.bytes()});
  }
  const std::vector<PartAxis> axes = ordered_axes(payload, box.shape);
  const std::vector<uint64_t> spans = inner_spans(axes, size);
  const PartCut cut = find_cut(axes, spans, max_bytes);
  uint64_t first = payload.offset;
  for (size_t d = 0; d < box.rank(); ++d) {
    first +=
        static_cast<uint64_t>(box.offset[d]) * static_cast<uint64_t>(payload.strides[d]) * size;
  }

  const size_t walked = std::min(cut.block + 1, axes.size());  // axes that are indexed
  std::vector<uint64_t> index(walked, 0);
  while (true) {
    Part part{box, first, cut.block < axes.size() ? spans[cut.block + 1] : size};
    for (size_t i = 0; i < walked; ++i) {
      const PartAxis& axis = axes[i];
      const bool grouped = i == cut.block;
      const uint64_t count = grouped ? std::min(cut.group, axis.count - index[i]) : 1;
      part.box.offset[axis.dim] += static_cast<int64_t>(index[i]);
      part.box.shape[axis.dim] = static_cast<int64_t>(count);
      part.offset += index[i] * axis.step;
      if (grouped) part.size += (count - 1) * axis.step;
    }
    emit(std::move(part));
    size_t i = walked;
    while (i > 0) {
      index[i - 1] += i - 1 == cut.block ? cut.group : 1;
      if (index[i - 1] < axes[i - 1].count) break;
      index[--i] = 0;
    }
    if (i == 0) return;
  }
}

}  // namespace tilestone::engine
