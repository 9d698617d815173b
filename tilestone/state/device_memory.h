// Memory that the CPU can't address (such as a GPU's), and copies between it and host memory.
//
// Copies are submitted in batches, and each batch is waited for once. So a device can copy one
// batch while the host writes or reads another one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/geometry/box.h"

namespace tilestone {

class DeviceMemory;

// One copy of a batch. Byte ranges refer to the C-contiguous copy of the tensor.
struct DeviceCopy {
  std::shared_ptr<DeviceMemory> memory;  // the tensor
  uint64_t begin = 0;                    // its first byte that is copied
  MutableByteView host;                  // as many bytes; only read by a copy to the device
};

enum class CopyTo : uint8_t { kHost, kDevice };

// A batch of copies that was submitted. Used by one thread at a time.
class DeviceTransfer {
 public:
  // If wait() was not called, waits without reporting a failure.
  virtual ~DeviceTransfer() = default;
  // Returns when all copies have ended. Throws if one has failed. Called at most once.
  virtual void wait() = 0;
};

// Makes host memory of that many bytes fast for copies from and to a device (pinned memory).
// Returns an owner of the memory that undoes this before it releases the memory; or `memory`
// itself if it can't be pinned.
using PinHost =
    std::function<std::shared_ptr<std::byte>(std::shared_ptr<std::byte> memory, uint64_t bytes)>;

// A tensor in the memory of a device. All calls may come from several threads at once.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::string device() const = 0;  // "cuda:0"
  // Starts the copies and returns, in general before they are done. All are of this object's class
  // and device. They see what the program did to the memory before it passed the tensor to
  // Tilestone. The device does the batches in the order in which they are submitted. Until a
  // transfer has ended it keeps the tensors alive, and neither side's bytes may be changed, or read
  // where they are written.
  virtual std::unique_ptr<DeviceTransfer> submit(CopyTo to, std::span<const DeviceCopy> copies) = 0;
  // The part of the tensor inside `box`, which is in the tensor's own coordinates.
  virtual std::shared_ptr<DeviceMemory> narrow(const Box& box) = 0;
  // Pins host memory for copies from and to this device. It may be kept for longer than this
  // tensor, and does not keep it alive. Empty if pinning has no use.
  virtual PinHost pin() const { return {}; }
};

// Copies of any classes and devices, which were submitted as one batch for each class and device.
// The destructor waits for those that wait() has not waited for.
class DeviceBatch {
 public:
  DeviceBatch() = default;
  DeviceBatch(CopyTo to, std::span<const DeviceCopy> copies);
  void wait();  // throws the first failure

 private:
  std::vector<std::unique_ptr<DeviceTransfer>> transfers_;
};

// Submits the copies and waits for them.
void copy_now(CopyTo to, std::span<const DeviceCopy> copies);

}  // namespace tilestone
