// Hashes a value's content, to find out whether ranks hold the same.
#pragma once

#include <cstdint>
#include <functional>

#include "tilestone/state/tensor_view.h"
#include "tilestone/state/value.h"

namespace tilestone {

// Equal values have equal hashes. So do sets and dicts whose entries are in a different order,
// because Python orders a set of strings differently in each process. Never 0. Another version of
// Tilestone may give another hash. The hash is only compared between ranks, and only stored to
// compare the copies within one save.
uint64_t content_hash(const Value& value);

// The same for a tensor's elements alone, in C order, without dtype and shape. The tensor has data,
// in host memory or on a device. Never 0.
uint64_t elements_hash(const TensorView& tensor);

// Calls `take` with the bytes of the tensor's elements in C order, block by block. Elements that
// are contiguous in host memory are not copied. Every block but the last has the same size, a
// multiple of 64 KiB.
void for_each_block(const TensorView& tensor, const std::function<void(ByteView)>& take);

}  // namespace tilestone
