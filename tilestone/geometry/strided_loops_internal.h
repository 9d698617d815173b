// The loop nest of a copy between two strided tensors, with dims merged, ordered and blocked.
// Private to geometry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tilestone/geometry/strided_copy.h"

namespace tilestone {

// One loop. Strides are in bytes.
struct CopyLoop {
  int64_t count = 0;
  int64_t target_stride = 0;
  int64_t source_stride = 0;
};

// Each iteration of the innermost loop copies `run` contiguous bytes. The outermost loop comes
// first.
struct CopyNest {
  std::byte* target = nullptr;
  const std::byte* source = nullptr;
  std::vector<CopyLoop> loops;  // every count >= 2
  int64_t run = 0;              // 0: nothing to copy
};

// The smallest number of loops that copies `source` to `target`, in an order that suits the
// target's memory.
CopyNest make_nest(const StridedView& target, const StridedView& source);

// Runs the nest in this thread.
void run_nest(const CopyNest& nest);

}  // namespace tilestone
