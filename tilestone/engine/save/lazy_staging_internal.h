// Staging that goes on after the call of a save (stage = "lazy" in Python): the save's thread
// copies the tensors while the program computes. A snapshot is the state of the call, or the save
// fails. The argument, for a program that changes tensors only on the thread that seals:
//
//  1. In the call, the counter of changes of each watched tensor is noted. A tensor that has none
//     is copied at once.
//  2. The save's thread copies the others. It may read bytes that an operation is changing, and see
//     no change of the counter, because an operation raises it after it has changed the bytes. So
//     the thread decides nothing.
//  3. seal() is called on the program's thread, which is then in no operation. It copies what is
//     left, and compares the counters. If they are those of the call, no operation has changed a
//     tensor between the call and now, so whatever was read is the state of the call. From then on
//     the tensors are not read.
//  4. The save's thread may have written what it has copied. It reports nothing before seal().
//
// No counter shows the changes that bypass torch's operations. For these, as they are usually
// large:
//
//  5. In the call, the bits at places spread over each tensor are noted: of every part of it at the
//     same rate, at least once in each block. What is copied must have the same bits there, and
//     so must the tensors in seal().
//  6. The save's thread compares everything that it has copied with the tensors once more, as far
//     as it comes before seal().
//
// A device makes its copies itself: the call submits them behind what the caller has given to the
// device, seal() waits for them, and 1, 3 and 4 hold. An operation raises the counter when the
// program calls it, and runs later: so if none was called, none has run before the copies had
// ended. A tensor without a counter is copied before the device does anything that the program
// gives to it after the call. 5 and 6 are left out on devices, because the call would wait.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/thread_pool.h"
#include "tilestone/engine/run/pending_internal.h"
#include "tilestone/engine/write/stage_internal.h"

namespace tilestone::engine {

class LazyStaging {
 public:
  // The key of a watched tensor that was changed since it is watched; nullopt: none was.
  using Look = std::function<std::optional<std::string>()>;
  // `watch` is called in the call, on every rank at most once; `look` by seal(), at most once.
  LazyStaging(WatchTensors watch, Look look);

  // ---- In the call

  const WatchTensors* watch() const { return &watch_; }
  // What stage_tensors() has left; notes samples of it. `threads` may be null. If nothing is left,
  // this seals.
  void begin(StagedLater left, std::shared_ptr<StagingMemory> memory,
             std::shared_ptr<ThreadPool> threads);
  bool is_sealed() { return sealed_.done(); }

  // ---- On the save's thread, in this order

  // Returns once everything is copied; seals if no tensor is watched. Error(kInvalidArgument) with
  // the key of a tensor that a sample or the second read finds changed.
  void read(const Deadline& deadline);
  // Waits for seal(), and throws its failure. Error(kTimeout) if the program has not called it.
  void expect_sealed(const Deadline& deadline);
  // The save has failed: the tensors and the staging memory are not used from now on.
  void end(std::exception_ptr why);

  // ---- On a thread of the program

  // Returns the failure: Error(kInvalidArgument) with the key of a changed tensor, or what end()
  // was given. Null: the tensors may change. Does nothing when called again.
  std::exception_ptr seal();

 private:
  // Part of a tensor, which is copied at once.
  struct Block {
    size_t copy = 0;
    uint64_t begin = 0;  // byte offsets in the C-contiguous tensor
    uint64_t end = 0;
    uint64_t samples = 1;
    uint64_t sample = 0;  // what sample_of() returned in the call
  };
  uint64_t sample_of(const Block& block) const;
  bool advance();  // returns whether there are more
  void copy(const Block& block) const;
  void compare(const Block& block);
  void copy_rest_and_look();
  void for_each(size_t count, const std::function<void(size_t)>& body) const;  // on all threads
  void end_sealing(std::exception_ptr failure);

  WatchTensors watch_;
  Look look_;
  std::atomic<bool> is_wanted_ = false;  // seal() waits for the mutex, or was called
  Pending::State sealed_;                // ended with the mutex held
  std::mutex mutex_;                     // guards all below: no two threads copy blocks at once
  std::vector<LateCopy> copies_;
  std::vector<Block> blocks_;
  bool is_watched_ = true;  // some tensor
  std::shared_ptr<StagingMemory> memory_;
  std::shared_ptr<ThreadPool> threads_;
  Fetching fetching_;    // into memory_: it is destroyed, and so waited for, first
  size_t copied_ = 0;    // blocks
  size_t compared_ = 0;  // likewise
  Bytes again_;
};

}  // namespace tilestone::engine
