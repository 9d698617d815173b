// Writing a rank's share of a checkpoint: items as recipes, streamed through pooled buffers into
// new files. A tensor's bytes are copied once, into the buffer that is written, and their
// checksum is taken in that copy.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/kept_resources_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/report.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/items.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct WriteTask {
  const Items* items = nullptr;
  const LocalSavePlan* plan = nullptr;
  Assignment assignment;
  // Also report tensors that this rank holds without writing a chunk, so that the commit sees a
  // tensor that nobody writes. (By exchange the planner has seen it.)
  bool report_held = false;
  int rank = 0;
  int world_size = 1;
  std::string save_id;
  int first_file = 0;             // from which number on its data files have names
  KeptResources* kept = nullptr;  // threads and buffers of a session; null: fresh ones
};

// Writes the assigned items to new files, objects before tensors, and makes files and directory
// entries durable. On failure the files that it made are removed again (failures of that are
// logged).
RankReport write_items(Storage& storage, const Format& format, const WriteTask& task,
                       const SaveOptions& options, Deadline deadline);

}  // namespace tilestone::engine
