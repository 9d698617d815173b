#include "tilestone/engine/checkpoint_manager.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "keep." + what);
}

}  // namespace

void check_keep(const Keep& keep) {
  if (keep.last == 0) refuse("last is 0, but the newest checkpoint is always kept");
  if (keep.best && keep.best->metric.empty()) refuse("best has an empty name of a metric");
  if (keep.best && keep.best->count == 0) refuse("best keeps 0 steps; leave it out instead");
  if (keep.newer_than && !(*keep.newer_than >= 0)) {
    refuse("newer_than must be 0 seconds or more");
  }
}

std::vector<uint64_t> best_steps(std::span<const KeptStep> steps, const Best& best) {
  std::vector<std::pair<double, uint64_t>> ranked;  // the lowest is the best
  for (const KeptStep& each : steps) {
    const auto found = each.metrics.find(best.metric);
    if (found == each.metrics.end() || std::isnan(found->second)) continue;
    ranked.emplace_back(best.mode == Best::Mode::kMin ? found->second : -found->second, each.step);
  }
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second > b.second;
  });
  ranked.resize(std::min(ranked.size(), best.count));
  std::vector<uint64_t> found;
  for (const auto& [value, step] : ranked) found.push_back(step);
  return found;
}

std::vector<uint64_t> steps_to_prune(std::span<const KeptStep> durable, uint64_t saved,
                                     const Keep& keep) {
  std::set<uint64_t> kept;
  if (keep.best) {
    for (const uint64_t step : best_steps(durable, *keep.best)) kept.insert(step);
  }
  std::set<uint64_t> below;  // `saved` and older ones
  for (const KeptStep& each : durable) {
    if (each.step <= saved) below.insert(each.step);
    const bool is_multiple = keep.every > 0 && each.step % keep.every == 0;
    const bool is_young = keep.newer_than && (!each.age || *each.age < *keep.newer_than);
    if (is_multiple || is_young) kept.insert(each.step);
  }
  below.insert(saved);
  size_t newest = 0;
  for (auto step = below.rbegin(); step != below.rend() && newest < keep.last; ++step, ++newest) {
    kept.insert(*step);
  }
  std::vector<uint64_t> pruned;
  std::set_difference(below.begin(), below.end(), kept.begin(), kept.end(),
                      std::back_inserter(pruned));
  return pruned;
}

}  // namespace tilestone
