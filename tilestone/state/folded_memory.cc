#include "tilestone/state/folded_memory_internal.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tilestone/geometry/strided_copy.h"

namespace tilestone::state_internal {
namespace {

class FlatTransfer final : public DeviceTransfer {
 public:
  explicit FlatTransfer(DeviceBatch batch) : batch_(std::move(batch)) {}
  void wait() override { batch_.wait(); }

 private:
  DeviceBatch batch_;
};

class FoldedMemory final : public DeviceMemory {
 public:
  FoldedMemory(std::shared_ptr<DeviceMemory> flat, Dims shape, uint64_t itemsize, Box box)
      : flat_(std::move(flat)),
        shape_(std::move(shape)),
        itemsize_(itemsize),
        box_(std::move(box)) {
    // From the innermost dim outwards, dims belong to the run as long as all inner dims are
    // complete.
    size_t d = box_.rank();
    while (d > 0) {
      --d;
      run_ *= static_cast<uint64_t>(box_.shape[d]);
      if (box_.shape[d] != shape_[d]) break;
    }
    run_ *= itemsize_;
  }

  std::string device() const override { return flat_->device(); }
  PinHost pin() const override { return flat_->pin(); }
  std::unique_ptr<DeviceTransfer> submit(CopyTo to, std::span<const DeviceCopy> copies) override {
    std::vector<DeviceCopy> flat;
    for (const DeviceCopy& copy : copies) {
      const auto& folded = static_cast<const FoldedMemory&>(*copy.memory);
      folded.for_runs(copy.begin, copy.host.size(),
                      [&](uint64_t at, uint64_t done, uint64_t count) {
                        flat.push_back({folded.flat_, at, copy.host.subspan(done, count)});
                      });
    }
    return std::make_unique<FlatTransfer>(DeviceBatch(to, flat));
  }
  StridedView place() const override {
    const StridedView flat = flat_->place();
    if (flat.data == nullptr || !flat.is_contiguous()) return {};
    return StridedView::contiguous(flat.data, shape_, itemsize_).narrow(box_);
  }
  std::shared_ptr<DeviceMemory> narrow(const Box& box) override {
    check_bounds(box, box_.shape);
    Box inner = box;
    for (size_t d = 0; d < box.rank(); ++d) inner.offset[d] += box_.offset[d];
    return std::make_shared<FoldedMemory>(flat_, shape_, itemsize_, std::move(inner));
  }

 private:
  // Calls body(byte offset in the flat tensor, bytes done before, number of bytes) for each run in
  // bytes [begin, begin + size) of the box.
  template <typename Body>
  void for_runs(uint64_t begin, uint64_t size, const Body& body) const {
    for (uint64_t done = 0; done < size;) {
      const uint64_t count = std::min(size - done, run_ - (begin + done) % run_);
      body(place(begin + done), done, count);
      done += count;
    }
  }

  // The offset in the flat tensor of byte `at` of the box.
  uint64_t place(uint64_t at) const {
    uint64_t element = at / itemsize_, flat = 0, stride = 1;
    for (size_t d = box_.rank(); d-- > 0;) {
      const auto length = static_cast<uint64_t>(box_.shape[d]);
      flat += (element % length + static_cast<uint64_t>(box_.offset[d])) * stride;
      element /= length;
      stride *= static_cast<uint64_t>(shape_[d]);
    }
    return flat * itemsize_ + at % itemsize_;
  }

  const std::shared_ptr<DeviceMemory> flat_;
  const Dims shape_;
  const uint64_t itemsize_;
  const Box box_;
  uint64_t run_ = 1;  // bytes of the box that are contiguous in the flat tensor
};

}  // namespace

std::shared_ptr<DeviceMemory> fold_memory(std::shared_ptr<DeviceMemory> flat, Dims shape,
                                          uint64_t itemsize) {
  const Box whole = Box::whole(shape);
  return std::make_shared<FoldedMemory>(std::move(flat), std::move(shape), itemsize, whole);
}

}  // namespace tilestone::state_internal
