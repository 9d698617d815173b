// What hosts say of the steps that they hold, and what that makes together.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"

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

void encode_step(ByteWriter& out, const SaidStep& step);
SaidStep decode_step(ByteReader& in);

}  // namespace tilestone::engine
