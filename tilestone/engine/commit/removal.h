// Tensors and objects taken out of a checkpoint that stands.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/interrupt.h"
#include "tilestone/engine/run/location.h"

namespace tilestone {

struct Removal {
  std::vector<std::string> keys;   // of tensors, and unique ones of objects, sorted
  std::vector<std::string> files;  // data files of which nothing is left, sorted; they went
  uint64_t bytes = 0;              // of these files
  bool by_other = false;           // another caller has removed them while this one waited
};

struct RemovalOptions {
  // Seconds to wait for a save or another removal that is under way there, 0: not at all.
  double timeout = 60;
  std::shared_ptr<const Interrupt> interrupt = nullptr;  // of that waiting
};

// Removes every tensor, and every object, whose key (of an object: its unique key) begins with
// `prefix` from a checkpoint of Megatron-Core's in the format torch_dist, whoever wrote it. The
// common state stays. Nothing happens where no key begins so.
//
// The index and the manifest are written anew and replaced in one step: at any moment, and after a
// crash at any moment, the checkpoint is what it was, or the same without these keys. Then data
// files go in which nothing of it is left; in the others the bytes stay. Who has the checkpoint
// open may find files gone. What a crash leaves the next save there, or gc, removes, but for files
// of other writers. A checkpoint of another writer with integrity.json loses that file first.
//
// One caller is enough; several do it one after the other, and each returns once the keys are gone.
// Errors: kInvalidArgument for an empty prefix; kNotFound where no checkpoint stands; kUnsupported
// for other formats and dialects, where flattened tensors of Megatron-Core up to 0.15 are to stay
// (their index can't be written), and where the storage has no locks; kAlreadyExists where a save
// is under way for longer than the timeout; kCorrupt and kUnsafe when the checkpoint can't be read;
// kIo.
Removal remove_keys(const Location& location, std::string_view prefix,
                    const RemovalOptions& options = {});

}  // namespace tilestone
