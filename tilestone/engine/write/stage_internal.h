// Staging: what a rank is to write, copied into memory that the caller's program does not touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/items.h"

namespace tilestone::engine {

// Memory for the tensors of one save at a time, kept for the next one: touching fresh pages costs
// several times what the copy does. Used by one thread at a time.
class StagingMemory {
 public:
  // Empties it, and makes room for `bytes`. With `threads`, which may be null, fresh pages are
  // touched now.
  void reserve(uint64_t bytes, ThreadPool* threads);
  // The next `bytes` that begin `phase` bytes (less than a page) behind the beginning of a page;
  // none: at a multiple of 64. Error(kInternal) past what is reserved.
  MutableByteView take(uint64_t bytes, std::optional<uint64_t> phase);
  uint64_t capacity() const { return capacity_; }  // bytes

 private:
  std::shared_ptr<std::byte> memory_;  // whole pages
  uint64_t capacity_ = 0;
  uint64_t used_ = 0;
};

// Of the local plan: the assigned chunks, then the assigned copies.
std::vector<uint32_t> written_chunks(const Assignment& assignment);

// How many bytes stage_tensors() takes.
uint64_t staging_bytes(const Items& items, const LocalSavePlan& plan, const Assignment& assignment);

// Gives the assigned tensor chunks copies of their elements, C-contiguous, in `memory`, which must
// outlive them, and all others no data. A large chunk begins at the same place within a page as it
// did, so that files come out the same. Error(kTimeout), and the interrupt's reason, with the key.
void stage_tensors(Items& items, const LocalSavePlan& plan, const Assignment& assignment,
                   StagingMemory& memory, ThreadPool* threads, Deadline deadline);

// The same value with memory of its own for the elements of its tensors, however deep they stand.
// What holds none stays shared with `value`, and what was shared within it stays so.
Value own_tensors(const Value& value);

}  // namespace tilestone::engine
