// What everything that reads data files works with.
#pragma once

#include <cstdint>
#include <map>
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

// The sizes of data files, each asked once. Thread-safe.
class FileSizes {
 public:
  // ask(): the size of the file (an index into Metadata::files).
  template <typename Ask>
  uint64_t of(uint32_t file, const Ask& ask) {
    const std::lock_guard lock(mutex_);
    const auto [known, is_new] = sizes_.try_emplace(file, 0);
    if (is_new) known->second = ask();
    return known->second;
  }

 private:
  std::mutex mutex_;
  std::map<uint32_t, uint64_t> sizes_;
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
  std::shared_ptr<FileSizes> sizes = std::make_shared<FileSizes>();
  // Among those that read together: they begin at different copies of what they can't read where
  // it should be.
  int rank = 0;
};

// Whether Tilestone wrote the checkpoint and its manifest is gone. A save that replaces a
// checkpoint removes its manifest first.
bool was_replaced(const ReadContext& context);

// A data file of the metadata, opened. Error(kNotFound) when it is gone, with a hint where another
// save may have replaced the checkpoint meanwhile.
std::unique_ptr<ReadableFile> open_data(const ReadContext& context, uint32_t file);

}  // namespace tilestone::engine
