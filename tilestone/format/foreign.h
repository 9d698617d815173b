// Checkpoints of other kinds, known by their marks, so that nobody saves over what can't be
// replaced in one step.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>

#include "tilestone/base/bytes.h"

namespace tilestone {

struct ForeignCheckpoint {
  std::string kind;  // "a Megatron-Core checkpoint (zarr)"
  std::string mark;  // the file that shows it
  // Which of the files beside it are its own can be known, so a save can replace it as a whole.
  bool replaceable = false;
};

// The checkpoint of another kind that a directory holds, if any: Megatron-Core's (`metadata.json`
// that names a sharded_backend), zarr's (`.zarray`, `.zgroup`, `zarr.json`) or Hugging Face's
// (`model.safetensors`, `model.safetensors.index.json`). A torch_dist checkpoint without
// Megatron-Core's files is none of these.
//
// `names`: the files of the directory, relative to it. `read` returns a file's bytes and is called
// for `metadata.json` at most; what it throws comes out.
std::optional<ForeignCheckpoint> find_foreign(std::span<const std::string> names,
                                              const std::function<Bytes(const std::string&)>& read);

}  // namespace tilestone
