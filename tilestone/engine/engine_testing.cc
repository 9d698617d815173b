#include "tilestone/engine/engine_testing.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tilestone/comm/threads.h"
#include "tilestone/engine/checkpoint.h"

namespace tilestone {

TensorView counting(DType dtype, const Dims& shape, int64_t first) {
  TensorView tensor = TensorView::allocate(dtype, shape);
  const uint64_t size = itemsize(dtype);
  const int64_t count = numel(shape);
  for (int64_t i = 0; i < count; ++i) {
    std::byte* at = tensor.data + static_cast<uint64_t>(i) * size;
    const int64_t integer = first + i;
    const auto real = static_cast<float>(integer);
    if (dtype == DType::kFloat32) {
      std::memcpy(at, &real, size);
    } else {
      std::memcpy(at, &integer, std::min<uint64_t>(size, sizeof integer));
    }
  }
  return tensor;
}

Bytes elements(const TensorView& tensor) {
  Bytes out(tensor.bytes());
  if (!out.empty()) pack_range(tensor.strided_view(), 0, out);
  return out;
}

StateDict row_state(const Communicator& comm, int64_t first) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", counting(DType::kFloat32, {1, 8}, first + 8 * comm.rank()),
      {{0, comm.rank(), comm.size()}});
  state["p"] = counting(DType::kInt64, {3}, first);
  state["step"] = first;
  return state;
}

StateDict row_template(const Communicator& comm) {
  StateDict state;
  state["w"] = ShardedTensor::from_rank_offsets(
      "w", TensorView::without_data(DType::kFloat32, {1, 8}), {{0, comm.rank(), comm.size()}});
  state["p"] = TensorView::without_data(DType::kInt64, {3});
  state["step"] = nullptr;
  return state;
}

Value step_of(const Checkpoint& checkpoint) {
  if (const auto common = checkpoint.common()) return *common->find("step");
  return checkpoint.read_object("step");
}

Bytes plain_of(const Checkpoint& checkpoint) {
  if (const auto common = checkpoint.common()) return elements(common->find("p")->as_tensor());
  return elements(checkpoint.read("p"));
}

void expect_rows(const Location& location, int64_t first, int rows) {
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_EQ(elements(checkpoint.read("w")), elements(counting(DType::kFloat32, {rows, 8}, first)));
  EXPECT_EQ(plain_of(checkpoint), elements(counting(DType::kInt64, {3}, first)));
  EXPECT_EQ(step_of(checkpoint), Value(first));
}

std::vector<std::string> failures(int n, const std::function<void(Communicator)>& body) {
  std::vector<std::string> texts;
  for (const std::exception_ptr& error : run_ranks_collect(n, body)) {
    texts.emplace_back();
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& caught) {
      texts.back() = caught.what();
    }
  }
  return texts;
}

}  // namespace tilestone
