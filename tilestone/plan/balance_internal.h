// Sharing out the chunks of one set of holders.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tilestone {

// Gives each chunk, in the order of the calls, to the least-loaded holder; ties go to the lowest
// rank of a rotation that starts at a place that depends on the holders alone. Each call costs the
// logarithm of the number of calls; nothing costs the number of holders.
class HolderBalance {
 public:
  explicit HolderBalance(std::span<const int> holders);  // borrowed; ascending, not empty

  int give(uint64_t bytes);  // the owner; bytes > 0

 private:
  struct Load {
    uint64_t bytes = 0;
    size_t turn = 0;  // place in the rotation
    friend bool operator<(const Load& a, const Load& b) {
      return a.bytes != b.bytes ? a.bytes < b.bytes : a.turn < b.turn;
    }
  };
  std::span<const int> holders_;
  size_t start_ = 0;
  std::vector<Load> loads_;  // a heap, least first, of the holders that own something
};

}  // namespace tilestone
