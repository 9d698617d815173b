// What everything that reads data files works with.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Of which lost files a warning was given. Thread-safe.
class WarnedFiles {
 public:
  // True once for each file (an index into Metadata::files).
  bool first_time(uint32_t file) {
    const std::lock_guard lock(mutex_);
    return files_.insert(file).second;
  }

 private:
  std::mutex mutex_;
  std::set<uint32_t> files_;
};

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
  std::shared_ptr<WarnedFiles> warned = std::make_shared<WarnedFiles>();
};

// Whether Tilestone wrote the checkpoint and its manifest is gone. A save that replaces a
// checkpoint removes its manifest first.
bool was_replaced(const ReadContext& context);

// A data file of the metadata, opened. Error(kNotFound) when it is gone, with a hint where another
// save may have replaced the checkpoint meanwhile.
std::unique_ptr<ReadableFile> open_data(const ReadContext& context, uint32_t file);

}  // namespace tilestone::engine
