// Copies from devices to host memory, in batches.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone::engine {

// All functions that submit or wait throw Error(kTimeout), the interrupt's reason, or what the
// device reports; with the key if it is known. Used by one thread at a time. The destructor waits
// for what was submitted.
class Fetching {
 public:
  // `to` has room for the tensor's bytes, and outlives this.
  void add(const TensorView& from, std::byte* to, const std::string& key);
  // Whether everything that was added was copied.
  bool empty() const { return added_.empty() && running_.empty(); }

  // Copies what was added. A few batches are submitted at a time.
  void run(const Deadline& deadline);
  // Submits what was added, and does not wait for it.
  void submit(const Deadline& deadline);
  // Likewise, and what the program gives to the devices from now on comes after these copies:
  // `delay_program` must see to that. Waits for them if it returns false.
  void submit_ahead(const Deadline& deadline, const std::function<bool()>& delay_program);
  // Waits for the batch that was submitted first. There must be one.
  void wait_for_first();

 private:
  struct Batch {
    std::string key;  // of its only copy; empty if there are several
    DeviceBatch copies;
  };
  void submit_first(const Deadline& deadline);

  std::deque<DeviceCopy> added_;  // not submitted
  std::deque<std::string> keys_;  // of these
  std::deque<Batch> running_;
};

}  // namespace tilestone::engine
