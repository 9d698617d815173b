// Radix sort by an unsigned key. It takes linear time and avoids the branch mispredictions of
// std::sort's comparisons.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tilestone {

// Sorts by key(item), a uint64_t of at most `largest`. Items with equal keys keep their order.
// `scratch` is working memory; a caller that sorts often can reuse it.
template <typename T, typename Key>
void radix_sort(std::vector<T>& items, std::vector<T>& scratch, uint64_t largest, const Key& key) {
  constexpr int kDigit = 11;    // bits; the counters of a pass fit into the first-level cache
  constexpr size_t kFew = 128;  // items; up to this many, std::stable_sort is used
  const auto before = [&](const T& a, const T& b) { return key(a) < key(b); };
  if (std::is_sorted(items.begin(), items.end(), before)) return;
  if (items.size() <= kFew) return std::stable_sort(items.begin(), items.end(), before);
  scratch.resize(items.size());
  const int width = static_cast<int>(std::bit_width(largest));
  for (int shift = 0; shift < width; shift += kDigit) {
    std::array<size_t, size_t{1} << kDigit> starts = {};
    const auto digit = [&](const T& item) { return key(item) >> shift & (starts.size() - 1); };
    for (const T& item : items) ++starts[digit(item)];
    size_t begin = 0;
    for (size_t& start : starts) begin += std::exchange(start, begin);
    for (const T& item : items) scratch[starts[digit(item)]++] = item;
    items.swap(scratch);
  }
}

}  // namespace tilestone
