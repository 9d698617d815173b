#include "tilestone/geometry/padding.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tilestone/geometry/strided_copy.h"

namespace tilestone::padding_test {

// The tensor in the first corner of a larger, zeroed one, made by a strided copy.
Bytes padded_by_copy(Bytes& tensor, const Dims& shape, const Dims& padded, uint64_t itemsize) {
  Bytes larger(static_cast<uint64_t>(numel(padded)) * itemsize);
  const StridedView target = StridedView::contiguous(larger.data(), padded, itemsize);
  strided_copy(target.narrow(Box::whole(shape)),
               StridedView::contiguous(tensor.data(), shape, itemsize));
  return larger;
}

TEST(Padding, BlockByBlockGivesTheSameBytesAsACopy) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 2000; ++round) {
    Dims shape, padded;
    for (size_t d = random() % 5; d > 0; --d) {
      shape.push_back(static_cast<int64_t>(random() % 5));
      padded.push_back(shape.back() + static_cast<int64_t>(random() % 3));
    }
    const uint64_t itemsize = uint64_t{1} << (random() % 3);
    Bytes tensor(static_cast<uint64_t>(numel(shape)) * itemsize);
    for (std::byte& byte : tensor) byte = static_cast<std::byte>(1 + random() % 255);
    const Bytes wanted = padded_by_copy(tensor, shape, padded, itemsize);

    const Padding padding(shape, padded, itemsize);
    ASSERT_EQ(padding.padded_bytes(), wanted.size());
    Bytes found;
    uint64_t taken = 0;
    while (found.size() < wanted.size()) {
      const uint64_t begin = found.size();
      const uint64_t size = std::min<uint64_t>(1 + random() % 40, wanted.size() - begin);
      const Padding::Inner range = padding.inside(begin, begin + size);
      ASSERT_EQ(range.begin, taken);
      taken = range.end;
      Bytes block(size, std::byte{0});
      for (std::byte& byte : block) byte = static_cast<std::byte>(random());
      if (range.end > range.begin) {
        std::memcpy(block.data(), tensor.data() + range.begin, range.end - range.begin);
      }
      padding.spread(begin, block);
      found.insert(found.end(), block.begin(), block.end());
    }
    EXPECT_EQ(found, wanted) << to_string(shape) << " in " << to_string(padded);
    EXPECT_EQ(taken, tensor.size());
  }
}

TEST(Padding, OfEqualShapesChangesNothing) {
  const Padding padding({3, 4}, {3, 4}, 2);
  EXPECT_EQ(padding.padded_bytes(), 24u);
  EXPECT_EQ(padding.inside(5, 11).begin, 5u);
  EXPECT_EQ(padding.inside(5, 11).end, 11u);
}

}  // namespace tilestone::padding_test
