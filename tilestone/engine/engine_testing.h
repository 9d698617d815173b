// Helpers for tests that save and load.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/load.h"
#include "tilestone/engine/save.h"
#include "tilestone/storage/memory_storage.h"

namespace tilestone {

// A tensor whose element i (in C order) is `first + i`, in its own memory.
TensorView counting(DType dtype, const Dims& shape, int64_t first = 0);
// The bytes of a tensor's elements in C order.
Bytes elements(const TensorView& tensor);

// Row `comm.rank()` of a tensor "w" of comm.size() rows of 8 float32, counting from `first`, a
// plain tensor "p" that every rank has, and a value "step".
StateDict row_state(const Communicator& comm, int64_t first);
// The same without content: what a load is to fill.
StateDict row_template(const Communicator& comm);
// What a checkpoint of row_state() holds as "step", and the elements of its "p": items of their
// own, or in the common state.
Value step_of(const Checkpoint& checkpoint);
Bytes plain_of(const Checkpoint& checkpoint);
// Expects that the location holds row_state(·, first) of `rows` ranks, read without a template.
void expect_rows(const Location& location, int64_t first, int rows);

// What each rank of a group of `n` threw, as text; "" where it threw nothing.
std::vector<std::string> failures(int n, const std::function<void(Communicator)>& body);

}  // namespace tilestone
