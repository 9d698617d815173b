// Recognises checkpoints of other kinds, so that a save does not overwrite one that it can't
// replace in one step.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>

#include "tilestone/base/bytes.h"

namespace tilestone {

struct ForeignCheckpoint {
  std::string kind;  // "a Megatron-Core checkpoint (zarr)"
  std::string mark;  // the file by which it was recognised
  // True if the checkpoint's files can be distinguished from other files in the directory, so that
  // a save can replace the checkpoint as a whole.
  bool replaceable = false;
};

// Finds a checkpoint of another kind in a directory: Megatron-Core's (a `metadata.json` that names
// a sharded_backend), one in Megatron's legacy format (`mp_rank_00/...`), zarr's (`.zarray`,
// `.zgroup`, `zarr.json`), Hugging Face's (`model.safetensors`, `model.safetensors.index.json`) or
// torch_checkpointing's (`model_0.pt`, or another `_0.pt` beside `metadata.pkl`).
// A torch_dist checkpoint without Megatron-Core's files is none of these.
//
// `names`: the files of the directory, relative to it, sorted. `read` returns a file's bytes; it is
// called only for `metadata.json`, and its exceptions are passed on.
std::optional<ForeignCheckpoint> find_foreign(std::span<const std::string> names,
                                              const std::function<Bytes(const std::string&)>& read);

}  // namespace tilestone
