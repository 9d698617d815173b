// Receives the parts of local plans as they are decoded, so that a planner for many ranks need not
// build each plan.
#pragma once

#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone {

// Called for each part in the plan's order. The arguments are valid during the call only.
class PlanSink {
 public:
  virtual ~PlanSink() = default;
  // All tensors of the plan. `same`: they equal those of the previous plan, which was decoded
  // completely.
  virtual void tensor_table(const std::vector<PlanTensor>& table, bool same) = 0;
  virtual void holder_set(std::vector<int> ranks) = 0;
  virtual void chunk(const PlanChunk& chunk) = 0;
  virtual void object(const PlanObject& object) = 0;
};

// Decodes plans one after another. Most ranks have the same tensors as the previous rank; these are
// decoded only once.
class PlanDecoder {
 public:
  // Decodes the output of LocalSavePlan::encode(). Throws Error(kCorrupt), possibly after some
  // parts were passed to the sink.
  void decode(ByteView bytes, PlanSink& sink);

 private:
  void decode_table(ByteView encoded);
  void decode_parts(ByteReader& in, PlanSink& sink) const;

  // From the previous plan.
  bool decoded_ = false;  // completely
  Bytes encoded_table_;
  std::vector<PlanTensor> table_;
};

}  // namespace tilestone
