#include "tilestone/geometry/tilings_testing.h"

#include <algorithm>
#include <deque>

namespace tilestone {

std::vector<Box> grid_tiling(const Dims& shape, const Dims& counts) {
  std::vector<Box> boxes{Box{Dims(shape.size(), 0), shape}};
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t size = shape[d] / counts[d];
    std::vector<Box> cut;
    cut.reserve(boxes.size() * static_cast<size_t>(counts[d]));
    for (const Box& box : boxes) {
      for (int64_t i = 0; i < counts[d]; ++i) {
        cut.push_back(box);
        cut.back().offset[d] = i * size;
        cut.back().shape[d] = size;
      }
    }
    boxes = std::move(cut);
  }
  return boxes;
}

std::vector<Box> random_tiling(const Dims& shape, size_t count, std::mt19937_64& random) {
  std::deque<Box> open{Box::whole(shape)};
  std::vector<Box> done;
  while (!open.empty()) {
    Box box = open.front();
    open.pop_front();
    const size_t d = shape.empty() ? 0 : random() % shape.size();
    const bool enough = open.size() + done.size() + 1 >= count;
    if (enough || std::all_of(box.shape.begin(), box.shape.end(), [](auto n) { return n < 2; })) {
      done.push_back(box);
      continue;
    }
    if (box.shape[d] >= 2) {
      const auto cut = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(box.shape[d] - 1));
      Box rest = box;
      rest.offset[d] += cut;
      rest.shape[d] -= cut;
      box.shape[d] = cut;
      open.push_back(rest);
    }
    open.push_back(box);
  }
  std::shuffle(done.begin(), done.end(), random);
  return done;
}

std::vector<Box> crossing_rods(int64_t side) {
  std::vector<Box> boxes;
  const int64_t length = 2 * side;
  for (int64_t i = 0; i < side; ++i) {
    for (int64_t j = 0; j < side; ++j) {
      // Rods of different axes never intersect: in one dim, one has an even coordinate and the
      // other an odd one.
      boxes.push_back(Box{{0, 2 * i, 2 * j + 1}, {length, 1, 1}});
      boxes.push_back(Box{{2 * i + 1, 0, 2 * j}, {1, length, 1}});
      boxes.push_back(Box{{2 * i, 2 * j + 1, 0}, {1, 1, length}});
    }
  }
  return boxes;
}

}  // namespace tilestone
