// Writes a rank's part of a checkpoint: turns items into recipes and streams them into new files. A
// tensor's bytes are either copied once, into the buffer that is written, with the checksum
// computed in the same pass, or written directly from the tensor's memory (stream_internal.h).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/kept_resources_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/items.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct WriteTask {
  const Items* items = nullptr;
  const LocalSavePlan* plan = nullptr;
  Assignment assignment;
  // Also report tensors that this rank holds without writing a chunk, so that the commit finds
  // tensors that no rank writes. Not needed if the ranks exchange plans, because then the planner
  // finds them.
  bool list_held = false;
  int rank = 0;
  int world_size = 1;
  std::string save_id;
  int first_file = 0;             // the number of its first data file
  KeptResources* kept = nullptr;  // threads and buffers of a session; null: makes new ones
  // Removes the files that it made, after a failure. Null: remove_files().
  std::function<void(std::span<const std::string>)> discard = nullptr;
};

// Writes the assigned items to new files, objects before tensors. Files and directory entries are
// durable when it returns. On failure removes the files that it made; failures of that are logged.
Receipt write_items(Storage& storage, const Format& format, const WriteTask& task,
                    const SaveOptions& options, Deadline deadline);

}  // namespace tilestone::engine
