#include "tilestone/state/device_memory_testing.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/geometry/strided_copy.h"
#include "tilestone/geometry/strided_copy_testing.h"

namespace tilestone {

class LateTransfer final : public DeviceTransfer {
 public:
  LateTransfer(std::shared_ptr<LateDevice> device, CopyTo to, std::span<const DeviceCopy> copies);
  ~LateTransfer() override { finish(); }
  void wait() override;

 private:
  void finish();
  void run();

  const std::shared_ptr<LateDevice> device_;
  const CopyTo to_;
  std::vector<DeviceCopy> copies_;
  uint64_t number_ = 0;
  bool fails_ = false;
  bool done_ = false;  // guarded by the device's mutex
};

class LateMemory final : public DeviceMemory {
 public:
  LateMemory(std::shared_ptr<LateDevice> device, TensorView content)
      : device_(std::move(device)), content_(std::move(content)) {
    ++device_->tensors;
  }
  ~LateMemory() override { --device_->tensors; }
  LateMemory(const LateMemory&) = delete;
  LateMemory& operator=(const LateMemory&) = delete;

  std::string device() const override { return device_->name(); }
  std::unique_ptr<DeviceTransfer> submit(CopyTo to, std::span<const DeviceCopy> copies) override {
    return std::make_unique<LateTransfer>(device_, to, copies);
  }
  std::shared_ptr<DeviceMemory> narrow(const Box& box) override {
    return std::make_shared<LateMemory>(device_, content_.narrow(box));
  }
  PinHost pin() const override;
  const TensorView& content() const { return content_; }

 private:
  const std::shared_ptr<LateDevice> device_;
  const TensorView content_;
};

PinHost LateMemory::pin() const {
  return [device = device_](std::shared_ptr<std::byte> memory, uint64_t bytes) {
    std::byte* const begin = memory.get();
    {
      const std::lock_guard lock(device->mutex_);
      device->pinned_ranges_[begin] = bytes;
    }
    ++device->pins;
    device->pinned += bytes;
    return std::shared_ptr<std::byte>(begin, [device, bytes, memory](std::byte* pinned) {
      const std::lock_guard lock(device->mutex_);
      device->pinned_ranges_.erase(pinned);
      device->pinned -= bytes;
    });
  };
}

LateTransfer::LateTransfer(std::shared_ptr<LateDevice> device, CopyTo to,
                           std::span<const DeviceCopy> copies)
    : device_(std::move(device)), to_(to), copies_(copies.begin(), copies.end()) {
  for (const DeviceCopy& copy : copies_) {
    device_->count(copy.host);
    if (to_ == CopyTo::kHost) std::memset(copy.host.data(), 0xdb, copy.host.size());
  }
  const std::lock_guard lock(device_->mutex_);
  number_ = device_->batches++;
  fails_ = number_ >= device_->fail_at;
  device_->waiting_[number_] = this;
}

void LateTransfer::wait() {
  ++device_->waits;
  if (number_ + 1 == device_->batches) ++device_->idle_waits;
  finish();
  if (fails_) throw std::runtime_error("the device is gone");
}

// Does this batch and all earlier ones.
void LateTransfer::finish() {
  std::thread([&] {
    const std::lock_guard lock(device_->mutex_);
    auto& waiting = device_->waiting_;
    while (!done_) {
      LateTransfer* const next = waiting.begin()->second;
      if (!next->fails_) next->run();
      next->done_ = true;
      next->copies_.clear();
      waiting.erase(waiting.begin());
    }
  }).join();
}

void LateTransfer::run() {
  for (const DeviceCopy& copy : copies_) {
    const TensorView& content = static_cast<const LateMemory&>(*copy.memory).content();
    if (to_ == CopyTo::kHost) {
      pack_range(content.strided_view(), copy.begin, copy.host);
    } else {
      unpack_range(content.strided_view(), copy.begin, copy.host);
    }
  }
}

std::shared_ptr<LateDevice> LateDevice::create(std::string name) {
  return std::shared_ptr<LateDevice>(new LateDevice(std::move(name)));
}

TensorView LateDevice::put(const TensorView& content) {
  TensorView view = TensorView::without_data(content.dtype, content.shape);
  view.device = std::make_shared<LateMemory>(shared_from_this(), content);
  return view;
}

void LateDevice::count(MutableByteView host) {
  ++copies;
  bytes += host.size();
  largest = std::max<uint64_t>(largest, host.size());
  const std::lock_guard lock(mutex_);
  auto range = pinned_ranges_.upper_bound(host.data());
  const bool found = range != pinned_ranges_.begin() &&
                     (--range)->first + range->second >= host.data() + host.size();
  if (!found) unpinned += host.size();
}

}  // namespace tilestone
