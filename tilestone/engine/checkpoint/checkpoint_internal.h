// The state of an open checkpoint.
#pragma once

#include <memory>
#include <optional>

#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/reader_internal.h"

namespace tilestone::engine {

// An open checkpoint, and what its reads share.
struct OpenCheckpoint {
  std::shared_ptr<Storage> storage;
  Opened opened;
  std::shared_ptr<BufferPool> buffers;
  bool verify_checksums = true;
  CachePolicy cache = CachePolicy::kBypass;
  mutable ThreadPool threads;
  std::shared_ptr<WarnedFiles> warned = std::make_shared<WarnedFiles>();

  // Throws what Checkpoint::open() throws.
  OpenCheckpoint(const Location& location, const OpenOptions& options);
  OpenCheckpoint(Found found, const OpenOptions& options);
  ReadContext context(std::shared_ptr<const Interrupt> interrupt) const {
    ReadContext made{*storage,
                     *opened.format,
                     opened.metadata,
                     buffers,
                     threads,
                     verify_checksums,
                     Deadline::never().with_interrupt(std::move(interrupt)),
                     cache,
                     warned};
    made.has_manifest = opened.has_manifest_file();
    return made;
  }
};

// Implements Checkpoint::verify().
VerifyReport verify_checkpoint(const ReadContext& context, const Opened& opened,
                               const ProgressFn& progress, VerifiedFiles* shared);

}  // namespace tilestone::engine

namespace tilestone {

struct Checkpoint::State : engine::OpenCheckpoint {
  std::optional<CachePolicy> asked_cache;
  std::optional<SaveRecord> record;

  State(const Location& location, const OpenOptions& options);
};

}  // namespace tilestone
