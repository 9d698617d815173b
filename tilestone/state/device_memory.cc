#include "tilestone/state/tensor_view.h"

#include <map>
#include <typeindex>
#include <utility>

#include "tilestone/geometry/strided_copy.h"

namespace tilestone {

StridedView DeviceMemory::place() const { return {}; }

DeviceBatch::DeviceBatch(CopyTo to, std::span<const DeviceCopy> copies) {
  std::map<std::pair<std::type_index, std::string>, std::vector<DeviceCopy>> by_device;
  for (const DeviceCopy& copy : copies) {
    const DeviceMemory& memory = *copy.memory;
    by_device[{std::type_index(typeid(memory)), memory.device()}].push_back(copy);
  }
  for (const auto& [device, of_device] : by_device) {
    transfers_.push_back(of_device.front().memory->submit(to, of_device));
  }
}

void DeviceBatch::wait() {
  for (std::unique_ptr<DeviceTransfer>& transfer : transfers_) {
    transfer->wait();
    transfer.reset();
  }
  transfers_.clear();
}

void copy_now(CopyTo to, std::span<const DeviceCopy> copies) {
  if (!copies.empty()) DeviceBatch(to, copies).wait();
}

}  // namespace tilestone
