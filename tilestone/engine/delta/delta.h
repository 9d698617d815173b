// Deltas: what has changed in the tensors of a model from one version to the next, as a small file.
// docs/deltas.md describes their use, docs/formats/delta.md the file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tilestone/engine/run/options.h"

namespace tilestone {

struct DeltaOptions {
  Reading reading = {};      // of the checkpoints
  Checks checks = {};        // likewise; the base and the result are always checked
  Resources resources = {};  // threads
  ProgressFn progress = nullptr;
  std::shared_ptr<const Interrupt> interrupt = nullptr;
};

struct DeltaReport {
  // The id of the version that it begins with. A whole version begins with that of no tensors.
  std::string base;
  std::string result;        // the id of the version that it leads to, made of all its tensors
  uint64_t unchanged = 0;    // how many tensors are as in the base
  uint64_t changed = 0;      // how many tensors have other elements
  uint64_t added = 0;        // how many tensors are new, or have another dtype or shape
  uint64_t removed = 0;      // how many tensors of the base are gone
  uint64_t left_out = 0;     // how many objects the new version has: a delta has only tensors
  uint64_t bytes = 0;        // the size of the delta
  uint64_t whole_bytes = 0;  // the size of the new version's tensors
  double seconds = 0;        // how long it took
};

// Writes the file `path`, NAME.safetensors, with what has changed in the tensors from `a` to `b`,
// two checkpoints of any formats and layouts. Reads each once. The file appears at once, complete
// and durable, or not at all. Memory: 192 MiB.
// Throws Error(kAlreadyExists) if something is there, kInvalidArgument for another name or a key
// that is not UTF-8, and what Checkpoint::open and reads throw.
DeltaReport make_delta(const Location& a, const Location& b, const Location& path,
                       const DeltaOptions& options = {});

// Makes the checkpoint `target` (a directory, or one safetensors file) of the checkpoint `base` and
// a delta: as convert() does, in the base's format, with the objects of the base. The tensors of
// the base, and of what becomes of them, are checked before anything is written: Error(kMismatch),
// naming the key, if this is not the delta's base. Reads the base twice.
DeltaReport apply_delta(const Location& base, const Location& delta, const Location& target,
                        const DeltaOptions& options = {});

}  // namespace tilestone
