#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tilestone/geometry/strided_loops_internal.h"

namespace tilestone {
namespace {

void flip_negative(CopyNest& nest, CopyLoop& loop) {
  if (loop.target_stride >= 0 || loop.source_stride > 0) return;
  nest.target += (loop.count - 1) * loop.target_stride;
  nest.source += (loop.count - 1) * loop.source_stride;
  loop.target_stride = -loop.target_stride;
  loop.source_stride = -loop.source_stride;
}

// Whether the outer loop continues where the inner loop ends, in source and target.
bool mergeable(const CopyLoop& outer, const CopyLoop& inner) {
  return outer.target_stride == inner.target_stride * inner.count &&
         outer.source_stride == inner.source_stride * inner.count;
}

void merge_loops(std::vector<CopyLoop>& loops) {
  std::vector<CopyLoop> merged;
  for (const CopyLoop& loop : loops) {
    if (!merged.empty() && mergeable(merged.back(), loop)) {
      CopyLoop& outer = merged.back();
      outer = {outer.count * loop.count, loop.target_stride, loop.source_stride};
    } else {
      merged.push_back(loop);
    }
  }
  loops = std::move(merged);
}

// Copies `count` runs. A run size known at compile time becomes one load and one store.
template <size_t kRun>
void copy_runs(std::byte* target, int64_t target_stride, const std::byte* source,
               int64_t source_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(target + i * target_stride, source + i * source_stride, kRun);
  }
}

void copy_runs_of(int64_t run, std::byte* target, int64_t target_stride, const std::byte* source,
                  int64_t source_stride, int64_t count) {
  switch (run) {
    case 1:
      return copy_runs<1>(target, target_stride, source, source_stride, count);
    case 2:
      return copy_runs<2>(target, target_stride, source, source_stride, count);
    case 4:
      return copy_runs<4>(target, target_stride, source, source_stride, count);
    case 8:
      return copy_runs<8>(target, target_stride, source, source_stride, count);
    case 16:
      return copy_runs<16>(target, target_stride, source, source_stride, count);
    default:
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(target + i * target_stride, source + i * source_stride,
                    static_cast<size_t>(run));
      }
  }
}

constexpr int64_t kCacheLine = 64;  // bytes

// Copies a transposition: the target is dense along `inner`, the source along `outer`. The square
// tiles are at least a cache line wide, so each cache line of either side is fully used while it is
// in the cache.
void copy_transposed(int64_t run, std::byte* target, const std::byte* source, const CopyLoop& outer,
                     const CopyLoop& inner) {
  const int64_t tile = std::max<int64_t>(8, kCacheLine / run);
  for (int64_t o = 0; o < outer.count; o += tile) {
    const int64_t o_end = std::min(o + tile, outer.count);
    for (int64_t i = 0; i < inner.count; i += tile) {
      const int64_t count = std::min(tile, inner.count - i);
      for (int64_t row = o; row < o_end; ++row) {
        copy_runs_of(run, target + row * outer.target_stride + i * inner.target_stride,
                     inner.target_stride,
                     source + row * outer.source_stride + i * inner.source_stride,
                     inner.source_stride, count);
      }
    }
  }
}

// Whether the two innermost loops transpose small elements.
bool transposes(const CopyLoop& outer, const CopyLoop& inner, int64_t run) {
  return run <= 16 && std::abs(inner.source_stride) > std::abs(outer.source_stride) &&
         std::abs(inner.source_stride) >= kCacheLine && std::abs(outer.source_stride) < kCacheLine;
}

// Moves the loop along which the source is densest to just outside the innermost loop. (Sorting by
// target strides has already made the innermost loop the densest one in the target.)
void move_source_inward(std::vector<CopyLoop>& loops) {
  if (loops.size() < 3) return;
  const auto last = loops.end() - 1;
  const auto densest =
      std::min_element(loops.begin(), loops.end(), [](const CopyLoop& a, const CopyLoop& b) {
        return std::abs(a.source_stride) < std::abs(b.source_stride);
      });
  if (densest == last) return;
  std::rotate(densest, densest + 1, last);
}

}  // namespace

CopyNest make_nest(const StridedView& target, const StridedView& source) {
  const auto itemsize = static_cast<int64_t>(target.itemsize);
  CopyNest nest{target.data, source.data, {}, itemsize};
  for (size_t d = 0; d < target.shape.size(); ++d) {
    const int64_t count = target.shape[d];
    if (count == 0) return CopyNest{};
    if (count == 1) continue;
    CopyLoop loop{count, target.strides[d] * itemsize, source.strides[d] * itemsize};
    flip_negative(nest, loop);
    nest.loops.push_back(loop);
  }
  std::stable_sort(nest.loops.begin(), nest.loops.end(), [](const CopyLoop& a, const CopyLoop& b) {
    return std::abs(a.target_stride) > std::abs(b.target_stride);
  });
  merge_loops(nest.loops);
  if (!nest.loops.empty()) {
    const CopyLoop& inner = nest.loops.back();
    if (inner.target_stride == nest.run && inner.source_stride == nest.run) {
      nest.run *= inner.count;
      nest.loops.pop_back();
    }
  }
  move_source_inward(nest.loops);
  return nest;
}

void run_nest(const CopyNest& nest) {
  if (nest.run == 0) return;
  const size_t n = nest.loops.size();
  if (n == 0) {
    std::memcpy(nest.target, nest.source, static_cast<size_t>(nest.run));
    return;
  }
  const CopyLoop& inner = nest.loops[n - 1];
  const bool blocked = n >= 2 && transposes(nest.loops[n - 2], inner, nest.run);
  const size_t outer_loops = n - (blocked ? 2 : 1);
  std::vector<int64_t> at(outer_loops, 0);
  std::byte* target = nest.target;
  const std::byte* source = nest.source;
  while (true) {
    if (blocked) {
      copy_transposed(nest.run, target, source, nest.loops[n - 2], inner);
    } else {
      copy_runs_of(nest.run, target, inner.target_stride, source, inner.source_stride, inner.count);
    }
    size_t d = outer_loops;
    while (true) {  // advance the outer loops, like an odometer
      if (d == 0) return;
      const CopyLoop& loop = nest.loops[--d];
      target += loop.target_stride;
      source += loop.source_stride;
      if (++at[d] < loop.count) break;
      target -= loop.target_stride * loop.count;
      source -= loop.source_stride * loop.count;
      at[d] = 0;
    }
  }
}

}  // namespace tilestone
