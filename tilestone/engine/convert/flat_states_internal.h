// Tensors whose elements are scattered over flat tensors: the states of a distributed optimizer,
// put together from its buckets while they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/dtype.h"
#include "tilestone/engine/convert/stored_source_internal.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone::engine {

// A box of a tensor. Its element (i, j, ...) is element start + i * strides[0] + ... of a flat
// tensor.
struct ScatteredPart {
  Box box;
  size_t flat = 0;  // the result of FlatStates::add_stored() or add_view()
  int64_t start = 0;
  Dims strides;
};

struct ScatteredTensor {
  std::string key;  // for errors
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<ScatteredPart> parts;
};

// Reads a tensor window by window, from its beginning to its end, so that memory is bounded by the
// window, and by one part whose axes have another order in the flat tensor. Thread-safe after the
// last call of an add function.
class FlatStates : public std::enable_shared_from_this<FlatStates> {
 public:
  static constexpr uint64_t kWindow = StoredSource::kWindow;

  explicit FlatStates(std::shared_ptr<StoredSource> stored) : stored_(std::move(stored)) {}

  // A flat tensor: one of the checkpoint's, or one in memory, which its owner keeps.
  size_t add_stored(const StoredTensor& tensor);
  size_t add_view(TensorView tensor);
  DType dtype(size_t flat) const { return flats_[flat].dtype; }
  // Error(kCoverage), naming the key, unless the parts hold each element once. A part that occurs
  // twice is read once. Error(kMismatch) if they have different dtypes.
  size_t add_tensor(ScatteredTensor tensor);

  const ScatteredTensor& scattered(size_t index) const { return tensors_[index]; }
  // The whole tensor in `dtype`, as memory that the CPU can't address. Throws Error(kUnsupported)
  // if its elements can't be converted.
  TensorView tensor(size_t index, DType dtype);
  // Elements of a flat tensor, converted.
  struct Read {
    size_t flat = 0;
    int64_t begin = 0;
    TensorView into;  // 1-D, contiguous
  };
  void read(std::span<const Read> reads);

 private:
  class Memory;
  struct Flat {
    const StoredTensor* stored = nullptr;  // null: in memory
    TensorView view;
    DType dtype = DType::kFloat32;
  };

  void fetch(const Memory& memory, uint64_t begin, MutableByteView out);
  void fill_window(const Memory& memory, uint64_t begin);

  const std::shared_ptr<StoredSource> stored_;
  std::vector<Flat> flats_;
  std::vector<ScatteredTensor> tensors_;
  std::mutex mutex_;  // guards what follows
  TensorView window_;
  const Memory* in_window_ = nullptr;
  uint64_t window_begin_ = 0;  // bytes of the tensor
  uint64_t window_end_ = 0;
};

}  // namespace tilestone::engine
