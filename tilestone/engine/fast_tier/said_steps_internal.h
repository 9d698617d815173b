// What hosts say of the steps that they hold, and what that makes together.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/bytes.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"
#include "tilestone/engine/training_run/look_internal.h"

namespace tilestone::engine {

// A step as one host or, once they are united, all of them have it.
struct SaidStep {
  uint64_t step = 0;
  std::string save_id;
  Lineage lineage;
  bool drains = false;
  // Which rank of those that have it reads each of the step's data files; -1: no host has it.
  std::vector<int> owners;
  int keeper = 0;  // a rank whose host has the step's index

  bool is_whole() const;
  StepInfo info() const;  // with state kDurable, if it is whole
};

// The message of `rank`.
Bytes say_steps(std::span<const HeldStep> held, int rank);
// By ordinal, ascending. said[r] is the message of rank r; empty: another one speaks for its host.
// Error(kCorrupt) for other bytes.
std::vector<SaidStep> united_steps(std::span<const Bytes> said);

// As in base/both_ways.h.
void walk_step(auto& io, auto& step) {
  both::varint(io, step.step);
  both::text(io, step.save_id);
  walk_lineage(io, step.lineage);
  both::u8(io, step.drains);
  both::varint(io, step.keeper);
  both::each(io, step.owners, 1, [&](auto& rank) {
    int next = rank + 1;
    both::varint(io, next);
    if constexpr (both::kReads<std::remove_reference_t<decltype(io)>>) rank = next - 1;
  });
}

}  // namespace tilestone::engine
