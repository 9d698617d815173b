// How the line of a step is found. Steps of one run know their parent, but pruning removes parents,
// and a run that went back to an earlier step has left branches. So the way from a step to the one
// before is: its parent, if that stands; else of the steps with the same run id and a lower ordinal
// that do not have a higher number than the parent the one with the highest ordinal. A step that is
// wrongly taken so is one of an abandoned branch whose beginning was removed, while it was not.
// Beyond the first step of a run is the step without a run id that it continues, if any, and those
// with lower numbers.
#include <algorithm>
#include <utility>

#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone {
namespace {

// Whether `a` was saved before `b`, as far as steps tell.
bool is_older(const StepInfo& a, const StepInfo& b) {
  const uint64_t numbers[] = {a.lineage.ordinal, b.lineage.ordinal};
  return numbers[0] != numbers[1] ? numbers[0] < numbers[1] : a.step < b.step;
}

const StepInfo* step_before(std::span<const StepInfo> steps, const StepInfo& step) {
  const auto& parent = step.lineage.parent;
  if (!parent) return nullptr;
  const StepInfo* found = nullptr;
  for (const StepInfo& each : steps) {
    if (each.lineage.run != step.lineage.run || each.lineage.ordinal >= step.lineage.ordinal) {
      continue;
    }
    if (!parent->save_id.empty() && each.save_id == parent->save_id) return &each;
    if (each.step > parent->step) continue;
    if (found == nullptr || !is_older(each, *found)) found = &each;
  }
  return found;
}

void add_steps_without_run(Line& line, std::span<const StepInfo> steps, uint64_t highest) {
  Line older;
  for (const StepInfo& each : steps) {
    const bool is_listed = !line.empty() && line.front() == &each;
    if (each.lineage.run.empty() && each.step <= highest && !is_listed) older.push_back(&each);
  }
  std::stable_sort(older.begin(), older.end(),
                   [](const StepInfo* a, const StepInfo* b) { return a->step < b->step; });
  line.insert(line.end(), older.rbegin(), older.rend());
}

}  // namespace

const StepInfo* tip_of(std::span<const StepInfo> steps) {
  const StepInfo* tip = nullptr;
  for (const StepInfo& each : steps) {
    if (tip == nullptr || !is_older(each, *tip)) tip = &each;
  }
  return tip;
}

Line line_of(std::span<const StepInfo> steps, const StepInfo& tip) {
  Line line{&tip};
  if (tip.lineage.run.empty()) {
    add_steps_without_run(line, steps, tip.step);
    return line;
  }
  while (const StepInfo* next = step_before(steps, *line.back())) line.push_back(next);
  if (tip.lineage.after) add_steps_without_run(line, steps, *tip.lineage.after);
  return line;
}

bool is_on(const Line& line, const StepInfo& step) {
  return std::find(line.begin(), line.end(), &step) != line.end();
}

bool is_abandoned(const StepInfo& step, const Line& line) {
  const Lineage& newest = line.front()->lineage;
  return !newest.run.empty() && step.lineage.run == newest.run &&
         step.lineage.ordinal < newest.ordinal && !is_on(line, step);
}

std::vector<const StepInfo*> steps_beside(std::span<const StepInfo> steps, const Line& line) {
  std::vector<const StepInfo*> found;
  for (const StepInfo& each : steps) {
    if (each.step > line.front()->step && !is_on(line, each)) found.push_back(&each);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const StepInfo* a, const StepInfo* b) { return a->step > b->step; });
  return found;
}

}  // namespace tilestone
