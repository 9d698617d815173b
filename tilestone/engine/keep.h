// Which checkpoints of a run are kept. Pure functions: they see no storage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tilestone {

// The `count` steps whose metric of this name is the lowest or the highest. Steps without the
// metric, and those where it is NaN, are never among them.
struct Best {
  enum class Mode : uint8_t { kMin, kMax };
  std::string metric;
  Mode mode = Mode::kMin;
  size_t count = 1;
};

// A step is kept if one of these rules keeps it.
struct Keep {
  size_t last = 1;     // the newest ones, at least 1
  uint64_t every = 0;  // steps that are multiples of it; 0: none
  std::optional<Best> best = std::nullopt;
  // Seconds since it was saved. A step of unknown age is kept if this is set.
  std::optional<double> newer_than = std::nullopt;
};
// Error(kInvalidArgument), naming the field, for last == 0, best->count == 0, an empty name of a
// metric, and a newer_than that is negative or NaN.
void check_keep(const Keep& keep);

// What decides whether a step is kept.
struct KeptStep {
  uint64_t step = 0;
  std::map<std::string, double> metrics = {};
  std::optional<double> age = std::nullopt;  // seconds; nullopt: unknown
};

// The steps that no rule keeps, ascending. `durable`: the run's durable steps, in any order.
// `saved`: the step that has just become durable. Only steps below it are pruned: those above it
// are of a run that was abandoned when this one went back, and nothing has replaced them.
std::vector<uint64_t> steps_to_prune(std::span<const KeptStep> durable, uint64_t saved,
                                     const Keep& keep);

// The best of the steps first, at most `best.count`. Of two equal ones the newer is better.
std::vector<uint64_t> best_steps(std::span<const KeptStep> steps, const Best& best);

}  // namespace tilestone
