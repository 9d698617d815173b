#include "tilestone/engine/training_run/checkpoint_manager.h"

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

std::vector<uint64_t> best_steps(const Line& steps, const Best& best) {
  std::vector<std::pair<double, uint64_t>> ranked;  // the lowest is the best
  for (const StepInfo* each : steps) {
    const auto found = each->metrics.find(best.metric);
    if (found == each->metrics.end() || std::isnan(found->second)) continue;
    ranked.emplace_back(best.mode == Best::Mode::kMin ? found->second : -found->second, each->step);
  }
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second > b.second;
  });
  ranked.resize(std::min(ranked.size(), best.count));
  std::vector<uint64_t> found;
  for (const auto& [value, step] : ranked) found.push_back(step);
  return found;
}

std::vector<const StepInfo*> steps_to_prune(std::span<const StepInfo> durable,
                                            const StepInfo& saved, const Keep& keep, double now) {
  const Line line = line_of(durable, saved);
  std::set<uint64_t> kept;
  for (const StepInfo* each : line) {  // the newest first; a step in two folders counts once
    const bool is_multiple = keep.every > 0 && each->step % keep.every == 0;
    const bool is_young = keep.newer_than && (!each->time || now - *each->time < *keep.newer_than);
    if (is_multiple || is_young) kept.insert(each->step);
  }
  std::set<uint64_t> newest;
  for (auto each = line.begin(); each != line.end() && newest.size() < keep.last; ++each) {
    newest.insert((*each)->step);
  }
  kept.merge(newest);
  if (keep.best) {
    for (const uint64_t step : best_steps(line, *keep.best)) kept.insert(step);
  }
  const auto is_superseded = [&](const StepInfo& step) {
    std::set<uint64_t> newer;
    for (const StepInfo* each : line) {
      if (each->lineage.ordinal > step.lineage.ordinal) newer.insert(each->step);
    }
    return newer.size() >= keep.last;
  };
  std::vector<const StepInfo*> pruned;
  for (const StepInfo& each : durable) {
    const bool goes = is_on(line, each) ? !kept.contains(each.step)
                                        : is_abandoned(each, line) && is_superseded(each);
    if (goes) pruned.push_back(&each);
  }
  return pruned;
}

}  // namespace tilestone
