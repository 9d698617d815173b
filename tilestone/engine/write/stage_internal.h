// Staging: copies the tensors that a rank must write into memory that the trainer does not touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/write/fetching_internal.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/items.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone::engine {

// Memory for the tensors of one save at a time. It is kept for the next save, because touching and
// pinning fresh pages costs several times as much as the copy. Used by one thread at a time.
class StagingMemory {
 public:
  // Discards the contents and makes room for `bytes`. If `threads` is not null, touches fresh pages
  // now. Error(kIo) if there is no memory.
  void reserve(uint64_t bytes, ThreadPool* threads);
  // Pins what was reserved, unless that is done or `pin` is empty. Fresh pages are touched first,
  // by `threads` (may be null).
  void pin(const PinHost& pin, ThreadPool* threads);
  // Takes the next free `bytes`. They begin `phase` bytes (less than a page) after the start of a
  // page; without `phase`, at a multiple of 64. Error(kInternal) if the reserved memory is used up.
  MutableByteView take(uint64_t bytes, std::optional<uint64_t> phase);
  uint64_t capacity() const { return capacity_; }  // bytes

 private:
  std::shared_ptr<std::byte> memory_;  // whole pages
  uint64_t capacity_ = 0;
  uint64_t used_ = 0;
  bool is_touched_ = false;
  bool is_pinned_ = false;
};

// Numbers of chunks in the local plan: the assigned chunks, then the assigned copies.
std::vector<uint32_t> written_chunks(const Assignment& assignment);

// How much StagingMemory a tensor of `bytes` takes at most.
uint64_t staging_room(uint64_t bytes);

// How many bytes of StagingMemory stage_tensors() needs.
uint64_t staging_bytes(const Items& items, const LocalSavePlan& plan, const Assignment& assignment);

// How to pin memory for the assigned chunks; empty if none of them is in device memory.
PinHost pin_for(const Items& items, const LocalSavePlan& plan, const Assignment& assignment);

// A tensor that a rank stages.
struct LiveTensor {
  const std::string* key = nullptr;
  const TensorView* data = nullptr;
};
// What stage_tensors() asks of a program whose tensors may be copied later.
struct WatchTensors {
  // Whether each of the tensors can be copied later.
  std::function<std::vector<bool>(const std::vector<LiveTensor>&)> watch;
  // Lets what the program gives to the devices of these tensors from now on, where it has computed
  // them, begin after the copies that were submitted. Does not wait. False: a device can't do that.
  std::function<bool()> delay_program;
};
// A copy that is left to be made, from host memory to contiguous memory.
struct LateCopy {
  std::string key;
  TensorView from;
  std::byte* to = nullptr;
};
// What stage_tensors() has left.
struct StagedLater {
  std::vector<LateCopy> copies;
  Fetching fetching;       // from devices: submitted, to be waited for
  bool is_watched = true;  // some tensor can be copied later: its changes matter
};

// Copies the elements of the assigned tensor chunks into `memory`, in C order, and lets the items
// refer to the copies. Pins the memory if a chunk is in device memory: such chunks are fetched in
// batches, while the threads copy the others. All other chunks lose their data. `memory` must
// outlive the items' use. A large chunk keeps its offset within a page, so that the files are the
// same as without staging. Throws Error(kTimeout) or the interrupt's reason, with the key.
//
// `watch`: asked about all tensors with elements; null: none can be copied later. Those in host
// memory that can are not copied but returned. Copies from devices are then not waited for: what
// the program gives to the devices from now on comes after those of the tensors that can't be
// copied later, and beside the others.
StagedLater stage_tensors(Items& items, const LocalSavePlan& plan, const Assignment& assignment,
                          StagingMemory& memory, ThreadPool* threads, Deadline deadline,
                          const WatchTensors* watch = nullptr);

}  // namespace tilestone::engine
