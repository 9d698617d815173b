// Removal of tensors and objects from an existing checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"

namespace tilestone {

struct Removal {
  std::vector<std::string> keys;   // of tensors, and unique keys of objects; sorted
  std::vector<std::string> files;  // data files that were removed as a whole, sorted
  uint64_t bytes = 0;              // total size of these files
  bool by_other = false;           // another caller removed the keys while this one waited
};

struct RemovalOptions {
  // Seconds to wait for a save or another removal that is under way there; 0 means no waiting.
  double timeout = 60;
  std::shared_ptr<const Interrupt> interrupt = nullptr;  // ends that waiting
};

// Removes every tensor whose key begins with `prefix`, and every object whose unique key does. The
// checkpoint must be of Megatron-Core's dialect in the format torch_dist; its writer may be
// Tilestone or another. The common state stays. If no key begins with `prefix`, nothing changes.
//
// Index and manifest are rewritten and replaced in one step. At any moment, and after a crash at
// any moment, the checkpoint is either unchanged or lacks exactly these keys. Afterwards, data
// files that contain none of the remaining items are removed; in other data files the bytes stay. A
// process that has the checkpoint open may find files gone. The files that a crash leaves are
// removed by the next save there or by gc, except data files of other writers. If another writer
// has left an integrity.json, that file is removed first.
//
// One caller is enough. Several callers run one after the other, and each returns once the keys are
// gone.
//
// Errors: kInvalidArgument for an empty prefix; kNotFound where there is no checkpoint;
// kUnsupported for other formats and dialects, where flattened tensors of Megatron-Core up to 0.15
// would remain (their index can't be written), and where the storage has no locks; kAlreadyExists
// where a save is under way for longer than the timeout; kCorrupt and kUnsafe when the checkpoint
// can't be read; kIo.
Removal remove_keys(const Location& location, std::string_view prefix,
                    const RemovalOptions& options = {});

}  // namespace tilestone
