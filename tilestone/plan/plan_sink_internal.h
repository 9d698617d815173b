// Local plans' parts as they are decoded, so that a planner of many ranks need not make each plan.
#pragma once

#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone {

// Called for each part in the plan's order; what is passed is valid for the call only.
class PlanSink {
 public:
  virtual ~PlanSink() = default;
  // All of the plan's tensors. same: they are those of the plan before, which was decoded whole.
  virtual void tensor_table(const std::vector<PlanTensor>& table, bool same) = 0;
  virtual void holder_set(std::vector<int> ranks) = 0;
  virtual void chunk(const PlanChunk& chunk) = 0;
  virtual void object(const PlanObject& object) = 0;
};

// Decodes plans one after another. Most ranks have the tensors of the rank before: these are
// decoded once.
class PlanDecoder {
 public:
  // What LocalSavePlan::encode() made; Error(kCorrupt), perhaps after some parts.
  void decode(ByteView bytes, PlanSink& sink);

 private:
  void decode_table(ByteView encoded);
  void decode_parts(ByteReader& in, PlanSink& sink) const;

  // Of the plan before.
  bool decoded_ = false;  // whole
  Bytes encoded_table_;
  std::vector<PlanTensor> table_;
};

}  // namespace tilestone
