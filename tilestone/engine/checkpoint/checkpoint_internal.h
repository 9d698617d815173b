// The state of an open checkpoint.
#pragma once

#include <memory>
#include <optional>

#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/reader_internal.h"

namespace tilestone {

struct Checkpoint::State {
  std::shared_ptr<Storage> storage;
  engine::Opened opened;
  std::optional<SaveRecord> record;
  std::shared_ptr<BufferPool> buffers;
  bool verify_checksums = true;
  std::optional<CachePolicy> asked_cache;
  CachePolicy cache = CachePolicy::kBypass;
  mutable ThreadPool threads;
  std::shared_ptr<engine::WarnedFiles> warned = std::make_shared<engine::WarnedFiles>();

  State(std::shared_ptr<Storage> storage_in, engine::Opened opened_in, const OpenOptions& options);
  engine::ReadContext context(std::shared_ptr<const Interrupt> interrupt) const {
    engine::ReadContext context{*storage,
                                *opened.format,
                                opened.metadata,
                                buffers,
                                threads,
                                verify_checksums,
                                Deadline::never().with_interrupt(std::move(interrupt)),
                                cache,
                                warned};
    context.has_manifest = opened.has_manifest_file();
    return context;
  }
};

namespace engine {

// Implements Checkpoint::verify().
VerifyReport verify_checkpoint(const ReadContext& context, const Opened& opened,
                               const ProgressFn& progress, VerifiedFiles* shared);

}  // namespace engine
}  // namespace tilestone
