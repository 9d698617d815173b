#include "tilestone/geometry/box.h"

#include <algorithm>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"

namespace tilestone {

bool Box::empty() const {
  return std::any_of(shape.begin(), shape.end(), [](int64_t n) { return n == 0; });
}

bool Box::contains(const Box& other) const {
  if (other.empty()) return true;
  for (size_t d = 0; d < rank(); ++d) {
    if (other.offset[d] < offset[d] || other.end(d) > end(d)) return false;
  }
  return true;
}

bool operator<(const Box& a, const Box& b) {
  if (a.offset != b.offset) return a.offset < b.offset;
  return a.shape < b.shape;
}

std::string to_string(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.rank(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(box.offset[d]) + ":";
    const auto end = try_add(box.offset[d], box.shape[d]);
    text += end ? std::to_string(*end)
                : std::to_string(box.offset[d]) + "+" + std::to_string(box.shape[d]);
  }
  return text + "]";
}

uint64_t hash_of(const Box& box) {
  return hash_of(box.offset) * 0x9e3779b97f4a7c15u + hash_of(box.shape);
}

bool intersects(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.rank(); ++d) {
    if (std::max(a.offset[d], b.offset[d]) >= std::min(a.end(d), b.end(d))) return false;
  }
  return true;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  if (!intersects(a, b)) return std::nullopt;
  Box common = a;
  for (size_t d = 0; d < a.rank(); ++d) {
    common.offset[d] = std::max(a.offset[d], b.offset[d]);
    common.shape[d] = std::min(a.end(d), b.end(d)) - common.offset[d];
  }
  return common;
}

Box relative_to(const Box& box, const Dims& origin) {
  Box shifted = box;
  for (size_t d = 0; d < box.rank(); ++d) shifted.offset[d] -= origin[d];
  return shifted;
}

void check_bounds(const Box& box, const Dims& global_shape) {
  const auto fail = [&](const std::string& problem) {
    // Offset and shape are printed separately because their lengths may differ in an invalid box.
    throw Error(ErrorCode::kInvalidArgument,
                "box with offset " + to_string(box.offset) + " and shape " + to_string(box.shape) +
                    " does not fit a tensor of shape " + to_string(global_shape) + ": " + problem);
  };
  if (box.offset.size() != global_shape.size() || box.shape.size() != global_shape.size()) {
    fail("the number of dims differs");
  }
  for (size_t d = 0; d < box.rank(); ++d) {
    const auto fail_dim = [&](const char* problem) {
      fail("dim " + std::to_string(d) + " " + problem);
    };
    if (box.offset[d] < 0) fail_dim("has a negative offset");
    if (box.shape[d] < 0) fail_dim("has a negative size");
    const auto end = try_add(box.offset[d], box.shape[d]);
    if (!end || *end > global_shape[d]) fail_dim("ends beyond the tensor");
  }
}

std::vector<Box> subtract(const Box& a, const Box& b) {
  if (a.empty()) return {};
  const auto common = intersect(a, b);
  if (!common) return {a};
  std::vector<Box> parts;
  Box rest = a;  // shrinks dim by dim to the common part; each box cut off goes to `parts`
  for (size_t d = 0; d < a.rank(); ++d) {
    const int64_t begin = common->offset[d];
    const int64_t end = common->end(d);
    if (rest.offset[d] < begin) {
      Box before = rest;
      before.shape[d] = begin - rest.offset[d];
      parts.push_back(before);
    }
    if (end < rest.end(d)) {
      Box after = rest;
      after.shape[d] = rest.end(d) - end;
      after.offset[d] = end;
      parts.push_back(after);
    }
    rest.offset[d] = begin;
    rest.shape[d] = end - begin;
  }
  return parts;
}

}  // namespace tilestone
