// Writes files of torch.save whose tensors are streamed.
#pragma once

#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// Throws Error(kInvalidArgument), naming the key, if torch.save has no form for something in the
// state, which consists of dicts, lists, values, plain tensors and sharded objects.
void check_torch_save(const StateDict& state);

// The state as one file at the location, which torch.load(weights_only=True) reads back: written
// under a temporary name beside it, made durable, and renamed. Error(kAlreadyExists) if something
// is there. `options`: resources, progress, interrupt and timeout.
void write_torch_save(const StateDict& state, const Location& location, const SaveOptions& options);

// The same as a folder that the package torch_checkpointing loads: a file for each entry of the
// state, and its index. A state with keys that can't be names of files becomes one item, "model".
// Error(kUnsupported) where there are no directories.
void write_torch_checkpointing(const StateDict& state, const Location& location,
                               const SaveOptions& options);

}  // namespace tilestone::engine
