// The context that all readers of data files share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/read/device_writes_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// What was logged already. Thread-safe.
class WarnedFiles {
 public:
  // True on the first call for a file (an index into Metadata::files).
  bool first_time(uint32_t file) {
    const std::lock_guard lock(mutex_);
    return files_.insert(file).second;
  }
  // True on the first call: parts of chunks are read that can't be checked.
  bool first_unchecked() {
    const std::lock_guard lock(mutex_);
    return !std::exchange(unchecked_, true);
  }

 private:
  std::mutex mutex_;
  std::set<uint32_t> files_;  // lost files
  bool unchecked_ = false;
};

// The sizes of data files. Each is queried once. Thread-safe.
class FileSizes {
 public:
  // The size of `file` (an index into Metadata::files), bytes. ask() queries it.
  template <typename Ask>
  uint64_t of(uint32_t file, const Ask& ask) {
    const std::lock_guard lock(mutex_);
    const auto known = sizes_.find(file);
    if (known != sizes_.end()) return known->second;
    return sizes_.emplace(file, ask()).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<uint32_t, uint64_t> sizes_;
};

// Everything that it refers to must outlive the calls that it is passed to.
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
  // This rank's number among those that read together. When an item can't be read from its own
  // place, it decides which copy this rank tries first.
  int rank = 0;
  bool has_manifest = false;  // a manifest described the checkpoint when it was opened
  std::shared_ptr<DeviceWrites> device_writes = std::make_shared<DeviceWrites>();
};

// What to leave in the page cache, unless a caller has `asked` for something: everything, where
// what is read (`bytes` by each of the host's `ranks`) fits into half of the `available` memory.
CachePolicy cache_policy(std::optional<CachePolicy> asked, uint64_t bytes, uint64_t ranks,
                         uint64_t available);

// Whether the checkpoint is gone or another save seems to have replaced it. If it had a manifest:
// the manifest is gone (what replaces a checkpoint removes the manifest first). Otherwise: the
// index is gone, or it names another save or other files.
bool was_replaced(const ReadContext& context);

// Opens a data file (an index into Metadata::files). If the file does not exist: Error(kNotFound)
// with a hint if was_replaced(), otherwise Error(kCorrupt) with ENOENT (is_missing()).
std::unique_ptr<ReadableFile> open_data(const ReadContext& context, uint32_t file);

// Whether the error of open_data() says that the checkpoint lacks the file.
bool is_missing(const Error& error);

}  // namespace tilestone::engine
