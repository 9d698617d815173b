// Distributes the chunks of one set of holders.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tilestone {

// Gives each chunk, in the order of the calls, to the least-loaded holder. Ties go to the first in
// a rotation of the holders by rank, whose start depends only on the holders. The time of a call is
// logarithmic in the number of calls and independent of the number of holders.
class HolderBalance {
 public:
  explicit HolderBalance(std::span<const int> holders);  // must outlive this; ascending, not empty

  int give(uint64_t bytes);  // returns the owner; bytes > 0

 private:
  struct Load {
    uint64_t bytes = 0;
    size_t turn = 0;  // position in the rotation
    friend bool operator<(const Load& a, const Load& b) {
      return a.bytes != b.bytes ? a.bytes < b.bytes : a.turn < b.turn;
    }
  };
  std::span<const int> holders_;
  size_t start_ = 0;
  std::vector<Load> loads_;  // a min-heap of the holders that already own something
};

}  // namespace tilestone
