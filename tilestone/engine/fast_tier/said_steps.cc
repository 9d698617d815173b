#include <algorithm>
#include <map>
#include <utility>

#include "tilestone/engine/fast_tier/said_steps_internal.h"

namespace tilestone::engine {
namespace {

// Of a step that no host holds whole, the owners are those that are known.
void unite(SaidStep& step, const SaidStep& other) {
  if (step.owners.size() != other.owners.size()) return;  // damaged, or of another step
  for (size_t i = 0; i < step.owners.size(); ++i) {
    if (step.owners[i] < 0) step.owners[i] = other.owners[i];
  }
}

}  // namespace

bool SaidStep::is_whole() const {
  return std::ranges::none_of(owners, [](int rank) { return rank < 0; });
}

StepInfo SaidStep::info() const {
  return {.step = step,
          .name = HostFolder::folder_of(step, save_id),
          .state = is_whole() ? StepState::kDurable : StepState::kDamaged,
          .save_id = save_id,
          .lineage = lineage};
}

Bytes say_steps(std::span<const HeldStep> held, int rank) {
  ByteWriter out;
  for (const HeldStep& each : held) {
    SaidStep step{each.about.step,
                  each.about.save_id,
                  lineage_of(each.about.attributes),
                  each.about.drains,
                  std::vector<int>(each.about.files.size(), -1),
                  rank};
    for (const uint32_t file : each.here) step.owners[file] = rank;
    walk_step(out, step);
  }
  return std::move(out).take();
}

std::vector<SaidStep> united_steps(std::span<const Bytes> said) {
  std::map<std::string, SaidStep> by_save;
  for (const Bytes& bytes : said) {
    ByteReader in(bytes, "what a host holds");
    while (in.remaining() > 0) {
      SaidStep step;
      walk_step(in, step);
      const auto [known, is_new] = by_save.emplace(step.save_id, step);
      if (!is_new) unite(known->second, step);
    }
  }
  std::vector<SaidStep> steps;
  for (auto& [save_id, step] : by_save) steps.push_back(std::move(step));
  std::ranges::sort(steps, {}, [](const SaidStep& step) { return step.lineage.ordinal; });
  return steps;
}

}  // namespace tilestone::engine
