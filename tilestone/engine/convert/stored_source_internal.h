// The tensors of a checkpoint as the source of another one's payload: a save, or a comparison,
// reads them piece by piece, and no tensor is ever in memory as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/engine/checkpoint/checkpoint_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/context_internal.h"
#include "tilestone/engine/read/optimizer_states_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"
#include "tilestone/state/tensor_view.h"
#include "tilestone/state/value.h"
#include "tilestone/storage/mapped_file.h"

namespace tilestone::engine {

// A tensor that is fetched from a source when it is copied: only read, and only as a whole. The
// copies of one batch may be of several such tensors.
class FetchedMemory : public DeviceMemory {
 public:
  std::unique_ptr<DeviceTransfer> submit(CopyTo to, std::span<const DeviceCopy> copies) final;
  std::shared_ptr<DeviceMemory> narrow(const Box&) final;

 private:
  // Bytes [begin, begin + out.size()) of the C-contiguous tensor.
  virtual void fetch(uint64_t begin, MutableByteView out) const = 0;
};

// Changes what is read of a source's tensors.
class TensorPatch {
 public:
  virtual ~TensorPatch() = default;
  // Whether all its elements come from here, so that the source need not have it.
  virtual bool supplies(const StoredTensor& tensor) const = 0;
  // `elements`: those from byte `begin` of the tensor on, in C order and in its own dtype.
  virtual void apply(const StoredTensor& tensor, uint64_t begin,
                     MutableByteView elements) const = 0;
};

// How the source of a conversion or comparison is opened.
template <typename Options>
OpenOptions opening_of(const Options& options) {
  OpenOptions open;
  open.reading = options.reading;
  open.checks = options.checks;
  open.resources.threads = options.resources.threads;
  open.interrupt = options.interrupt;
  return open;
}

// An open checkpoint whose tensors are read through one window of memory. It is fast if the tensors
// are read one after the other, in the order of the calls of tensor(), each from its beginning to
// its end: many small ones then cost one read, and every byte is read once. Any other order is
// slow, but right. Thread-safe.
class StoredSource : public std::enable_shared_from_this<StoredSource> {
 public:
  static constexpr uint64_t kWindow = 32u << 20;   // bytes
  static constexpr uint64_t kBuffers = 16u << 20;  // bytes of pooled memory for reads

  // `options`: its buffer_bytes is ignored. Throws what Checkpoint::open throws.
  static std::shared_ptr<StoredSource> open(const Location& location, const OpenOptions& options);

  const Opened& opened() const { return open_.opened; }
  const Metadata& metadata() const { return open_.opened.metadata; }

  // The whole tensor in `dtype`, as memory that the CPU can't address (TensorView::device).
  // `stored`: of metadata(), or of the optimizer's states. Throws what plan_load() throws:
  // Error(kUnsupported) if its elements can't be converted, kCoverage if some are not stored.
  TensorView tensor(const StoredTensor& stored, DType dtype);
  // Fills the pieces of the items. Boxes of a tensor may be few and small.
  void read(std::span<const TensorItem> items, bool cast);
  // Reads a distributed optimizer's states from its buckets; read() takes their keys from now on.
  const OptimizerStates& unpack_optimizer(std::vector<OptimizerLayout> layouts);
  // For tensor(), of tensors that are not cast.
  void patch_with(std::shared_ptr<const TensorPatch> patch) { patch_ = std::move(patch); }
  Value object(const StoredObject& object) const;
  // The same, but its tensors are the file's bytes where they are mapped, as long as this source
  // lives, so that a large object takes no memory. Its checksums are checked.
  Value object_in_place(const StoredObject& object);
  std::optional<Value> common() const;

 private:
  class Memory;
  struct Asked {
    const StoredTensor* stored = nullptr;
    DType dtype = DType::kFloat32;
    uint64_t bytes = 0;
  };
  // Bytes [begin, end) of a tensor, in the window at `at`.
  struct Part {
    size_t asked = 0;  // index into asked_
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t at = 0;
  };

  StoredSource(const Location& location, const OpenOptions& options)
      : open_(location, options), interrupt_(options.interrupt) {}
  ReadContext context() const { return open_.context(interrupt_); }
  void read_now(std::vector<TensorItem> items, bool cast);
  void fetch(size_t asked, uint64_t begin, MutableByteView out);
  const Part* find(size_t asked, uint64_t begin) const;
  void fill_window(size_t asked, uint64_t begin);
  uint64_t end_of_part(const Asked& asked, uint64_t begin) const;

  const OpenCheckpoint open_;
  const std::shared_ptr<const Interrupt> interrupt_;
  std::optional<OptimizerStates> states_;
  std::shared_ptr<const TensorPatch> patch_;
  std::mutex mutex_;  // guards what follows
  std::vector<Asked> asked_;
  std::vector<Part> parts_;  // of the window
  TensorView window_;
  std::vector<std::unique_ptr<MappedFile>> mapped_;
};

}  // namespace tilestone::engine
