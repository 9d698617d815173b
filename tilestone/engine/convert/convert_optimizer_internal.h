// Converts the state of Megatron-Core's distributed optimizer while a checkpoint is copied.
#pragma once

#include <string>

#include "tilestone/engine/convert/convert_source_internal.h"

namespace tilestone::engine {

// Replaces the optimizer's buckets (dp_reshardable) or objects (dp_zero_gather_scatter) in `source`
// by a tensor for each parameter and state, "optimizer.state.STATE.KEY", and its param groups by
// common state: the format fully_reshardable, with the same values.
//
// Buckets say nothing about the model. Where its parameters are is read from `layout_file`, or, if
// that is "", from the objects with layouts in the checkpoint. The layouts are checked: against the
// sizes of the buckets and, if the checkpoint holds the model, against its shapes and against some
// values of each of its parameters.
//
// Throws Error(kInvalidArgument) if no layout is known, or the state needs no conversion;
// kMismatch, with the key of the first parameter that does not fit the checkpoint; kUnsupported for
// fsdp_dtensor; kNotFound if there is no such state; and what reads throw.
void make_fully_reshardable(ConvertSource& source, const std::string& layout_file);

}  // namespace tilestone::engine
