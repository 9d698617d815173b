// What everything that reads data files works with.
#pragma once

#include <cstdint>
#include <memory>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// All of it outlives the calls that it is passed to.
struct ReadContext {
  Storage& storage;
  const Format& format;
  const Metadata& metadata;
  std::shared_ptr<BufferPool> buffers;
  ThreadPool& threads;
  bool verify_checksums = true;
  Deadline deadline = Deadline::never();
  CachePolicy cache = CachePolicy::kBypass;
};

// Whether Tilestone wrote the checkpoint and its manifest is gone. A save that replaces a
// checkpoint removes its manifest first.
bool was_replaced(const ReadContext& context);

// A data file of the metadata, opened. Error(kNotFound) when it is gone, with a hint where another
// save may have replaced the checkpoint meanwhile.
std::unique_ptr<ReadableFile> open_data(const ReadContext& context, uint32_t file);

}  // namespace tilestone::engine
