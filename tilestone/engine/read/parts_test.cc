#include "tilestone/engine/read/parts_internal.h"

#include <gtest/gtest.h>

#include <random>

#include "tilestone/base/error.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone::engine::parts_test {

StoredPayload contiguous_payload(DType dtype, const Dims& shape) {
  StoredPayload payload;
  payload.dtype = dtype;
  payload.shape = shape;
  payload.strides = contiguous_strides(shape);
  payload.record_size = static_cast<uint64_t>(numel(shape)) * itemsize(dtype);
  return payload;
}

std::vector<Part> parts_of(const StoredPayload& payload, const Box& box, uint64_t max_bytes) {
  std::vector<Part> parts;
  split(payload, box, max_bytes, [&](Part part) { parts.push_back(std::move(part)); });
  return parts;
}

TEST(Parts, OfAnyBoxTileItAndFitTheLimit) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE(round);
    Dims shape, order;
    const size_t dims = random() % 5;
    for (size_t d = 0; d < dims; ++d) shape.push_back(static_cast<int64_t>(random() % 9 + 1));
    StoredPayload payload = contiguous_payload(DType::kFloat32, shape);
    if (dims > 1 && random() % 2 == 0) {  // a transposed tensor
      std::swap(payload.strides[0], payload.strides[dims - 1]);
      std::swap(payload.shape[0], payload.shape[dims - 1]);
    }
    Box box = Box::whole(payload.shape);
    for (size_t d = 0; d < dims; ++d) {
      box.offset[d] = static_cast<int64_t>(random()) & 1 ? 0 : payload.shape[d] / 3;
      box.shape[d] = std::max<int64_t>(1, (payload.shape[d] - box.offset[d]) / 2);
    }
    const uint64_t limit = 4 + random() % 200;
    const std::vector<Part> parts = parts_of(payload, box, limit);
    std::vector<Box> boxes;
    uint64_t last = 0;
    for (const Part& part : parts) {
      EXPECT_LE(part.size, limit);
      EXPECT_GE(part.offset, last);
      last = part.offset;
      boxes.push_back(part.box);
    }
    EXPECT_FALSE(find_overlap(boxes));
    EXPECT_FALSE(find_uncovered(box, boxes));
  }
}

TEST(Parts, LongRowsApartAreReadExactly) {
  const StoredPayload payload = contiguous_payload(DType::kFloat32, {64, 16384});
  const std::vector<Part> parts = parts_of(payload, {{0, 4096}, {64, 4096}}, 8u << 20);
  EXPECT_EQ(parts.size(), 64u);
  for (const Part& part : parts) EXPECT_EQ(part.size, 16384u);
}

TEST(Parts, ShortRowsWithinAPageAreReadTogether) {
  const StoredPayload payload = contiguous_payload(DType::kFloat32, {64, 16});
  EXPECT_EQ(parts_of(payload, {{0, 4}, {64, 4}}, 8u << 20).size(), 1u);
}

TEST(Parts, OfAWholeDenseChunkTileItsRecord) {
  StoredPayload payload = contiguous_payload(DType::kInt16, {30, 40, 50});
  std::swap(payload.strides[0], payload.strides[2]);
  std::swap(payload.shape[0], payload.shape[2]);
  ASSERT_TRUE(fills_record(payload));
  uint64_t end = 0;
  for (const Part& part : parts_of(payload, Box::whole(payload.shape), 1000)) {
    EXPECT_EQ(part.offset, end);
    end += part.size;
  }
  EXPECT_EQ(end, payload.record_size);
  payload.record_size += 2;
  EXPECT_FALSE(fills_record(payload));
}

TEST(Parts, AZeroDimTensorIsOneElement) {
  const std::vector<Part> parts = parts_of(contiguous_payload(DType::kFloat64, {}), {{}, {}}, 4096);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].size, 8u);
}

TEST(Parts, APayloadBeyondItsItemIsRefused) {
  StoredPayload payload = contiguous_payload(DType::kFloat32, {4});
  EXPECT_NO_THROW(check_payload(payload, 16));
  EXPECT_THROW(check_payload(payload, 15), Error);
  payload.strides = {int64_t{1} << 62};
  EXPECT_THROW(check_payload(payload, UINT64_MAX), Error);
  payload.strides = {-1};
  EXPECT_THROW(check_payload(payload, 1000), Error);
}

}  // namespace tilestone::engine::parts_test
