// A local plan's parts as they are decoded, so that a planner of many ranks need not make each
// plan.
#pragma once

#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone {

// Called for each part in the plan's order; what is passed is valid for the call only.
class PlanSink {
 public:
  virtual ~PlanSink() = default;
  virtual void tensor(const PlanTensor& tensor) = 0;
  virtual void holder_set(std::vector<int> ranks) = 0;
  virtual void chunk(const PlanChunk& chunk) = 0;
  virtual void object(const PlanObject& object) = 0;
};

// What LocalSavePlan::encode() made; Error(kCorrupt), perhaps after some parts.
void decode_plan(ByteView bytes, PlanSink& sink);

}  // namespace tilestone
