// A device for tests that is as late as a device may be.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "tilestone/state/tensor_view.h"

namespace tilestone {

// A batch of copies is done by a thread, when somebody waits for it or for a later one. Until then
// the host memory that it fills has wrong bytes; what is sent to the device is read at that time.
// All counts are of the device's whole life. Thread-safe.
class LateDevice : public std::enable_shared_from_this<LateDevice> {
 public:
  static std::shared_ptr<LateDevice> create(std::string name = "late:0");
  // A view of device memory that has the elements, and shares the memory, of `content`.
  TensorView put(const TensorView& content);
  const std::string& name() const { return name_; }

  std::atomic<uint64_t> batches = 0;
  std::atomic<uint64_t> copies = 0;
  std::atomic<uint64_t> bytes = 0;
  std::atomic<uint64_t> largest = 0;   // bytes of the largest copy
  std::atomic<uint64_t> unpinned = 0;  // bytes copied from and to memory that was not pinned
  std::atomic<uint64_t> waits = 0;
  std::atomic<uint64_t> idle_waits = 0;  // waits for the last batch that was submitted
  std::atomic<uint64_t> pins = 0;
  std::atomic<uint64_t> pinned = 0;              // bytes pinned now
  std::atomic<uint64_t> tensors = 0;             // tensors of this device that exist now
  std::atomic<uint64_t> fail_at = ~uint64_t{0};  // the batch, from 0, that fails

 private:
  friend class LateMemory;
  friend class LateTransfer;
  explicit LateDevice(std::string name) : name_(std::move(name)) {}
  void count(MutableByteView host);

  const std::string name_;
  std::mutex mutex_;
  std::map<const std::byte*, uint64_t> pinned_ranges_;  // begin, bytes
  std::map<uint64_t, class LateTransfer*> waiting_;     // submitted and not done, by number
};

}  // namespace tilestone
