#include <algorithm>
#include <utility>

#include "tilestone/geometry/coverage.h"
#include "tilestone/plan/planner_internal.h"

namespace tilestone::planner {
namespace {

uint64_t mix(uint64_t hash, int64_t value) {
  hash = (hash ^ static_cast<uint64_t>(value)) * 0x9fb21c651e98df25u;
  return hash ^ hash >> 29;
}

uint32_t short_hash(const Box& box) {
  uint64_t hash = 0x2545f4914f6cdd1du;
  for (size_t d = 0; d < box.rank(); ++d) hash = mix(mix(hash, box.offset[d]), box.shape[d]);
  return static_cast<uint32_t>(hash >> 32);
}

}  // namespace

Box Tensor::box(uint32_t index) const {
  const size_t dims = shape_.size();
  const std::span<const int64_t> all(coords_);
  return {Dims(all.subspan(index * 2 * dims, dims)),
          Dims(all.subspan((index * 2 + 1) * dims, dims))};
}

bool Tensor::box_before(uint32_t a, uint32_t b) const {
  const size_t size = 2 * shape_.size();
  return std::lexicographical_compare(coords(a), coords(a) + size, coords(b), coords(b) + size);
}

uint64_t Tensor::bytes(uint32_t index) const {
  uint64_t bytes = itemsize(dtype_);
  const size_t dims = shape_.size();
  for (size_t d = 0; d < dims; ++d) bytes *= static_cast<uint64_t>(coords(index)[dims + d]);
  return bytes;
}

bool Tensor::equals(uint32_t index, const Box& box) const {
  const size_t dims = shape_.size();
  return std::equal(box.offset.begin(), box.offset.end(), coords(index)) &&
         std::equal(box.shape.begin(), box.shape.end(), coords(index) + dims);
}

void Tensor::grow() {
  std::vector<Slot> slots(std::max<size_t>(4, slots_.size() * 2));
  const size_t mask = slots.size() - 1;
  for (const Slot& slot : slots_) {
    if (slot.index == kNone) continue;
    size_t at = slot.hash & mask;
    while (slots[at].index != kNone) at = (at + 1) & mask;
    slots[at] = slot;
  }
  slots_ = std::move(slots);
}

uint32_t Tensor::find_or_add(const Box& box) {
  if (chunks_.size() * 4 >= slots_.size() * 3) grow();
  const size_t mask = slots_.size() - 1;
  const uint32_t hash = short_hash(box);
  size_t at = hash & mask;
  for (; slots_[at].index != kNone; at = (at + 1) & mask) {
    if (slots_[at].hash == hash && equals(slots_[at].index, box)) return slots_[at].index;
  }
  const auto index = static_cast<uint32_t>(chunks_.size());
  slots_[at] = {hash, index};
  chunks_.emplace_back();
  coords_.insert(coords_.end(), box.offset.begin(), box.offset.end());
  coords_.insert(coords_.end(), box.shape.begin(), box.shape.end());
  return index;
}

// Distinct boxes are a regular or uneven grid, and so a tiling, if in each dim their intervals
// tile the dim and the numbers of intervals multiply to the number of boxes.
bool Tensor::is_grid() const {
  const size_t dims = shape_.size();
  std::vector<std::pair<int64_t, int64_t>> cuts(chunks_.size());
  size_t cells = 1;
  for (size_t d = 0; d < dims; ++d) {
    cuts.resize(chunks_.size());
    for (uint32_t i = 0; i < chunks_.size(); ++i) cuts[i] = {coords(i)[d], coords(i)[dims + d]};
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    int64_t end = 0;
    for (const auto& [offset, size] : cuts) {
      if (offset != end) return false;
      end += size;
    }
    if (end != shape_[d] || chunks_.size() % cuts.size() != 0) return false;
    cells *= cuts.size();
    if (cells > chunks_.size()) return false;
  }
  return cells == chunks_.size();
}

void Tensor::check_tiling() const {
  if (!has_elements_) return;
  if (!chunks_.empty() && is_grid()) return;
  std::vector<Box> boxes;
  boxes.reserve(chunks_.size());
  for (uint32_t i = 0; i < chunks_.size(); ++i) boxes.push_back(box(i));
  const auto fault = tilestone::check_tiling(shape_, boxes);
  if (!fault) return;
  const auto held = [&](size_t i) {
    return "rank " + std::to_string(chunks_[i].first_rank) + " holds box " + to_string(boxes[i]);
  };
  std::string problem;
  switch (fault->kind) {
    case TilingFault::Kind::kOutOfBounds:
      problem = held(fault->first) + " outside a tensor of shape " + to_string(shape_);
      break;
    case TilingFault::Kind::kOverlap:
      problem =
          held(fault->first) + ", " + held(fault->second) + ": they overlap without being equal";
      break;
    case TilingFault::Kind::kUncovered:
      problem = "no rank holds box " + to_string(fault->where) + " of a tensor of shape " +
                to_string(shape_);
      break;
  }
  throw Error(ErrorCode::kCoverage, problem).with_key(key_);
}

}  // namespace tilestone::planner
