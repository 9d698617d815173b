#include "tilestone/geometry/strided_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"

namespace tilestone::strided_copy_test {

// A tensor that owns its memory: dims in any memory order, with gaps, reversed dims or (as a
// source) repeated dims.
struct Tensor {
  Bytes memory;
  StridedView view;
};

enum class Repeats { kNever, kMaybe };

Tensor random_tensor(const Dims& shape, uint64_t itemsize, Repeats repeats,
                     std::mt19937_64& random) {
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (random() % 3 != 0) std::shuffle(order.begin(), order.end(), random);
  Tensor tensor;
  tensor.view = {nullptr, shape, Dims(shape.size(), 0), itemsize};
  int64_t stride = random() % 3 == 0 ? 2 : 1;
  int64_t start = 0;
  for (size_t i = order.size(); i-- > 0;) {
    const size_t d = order[i];
    if (repeats == Repeats::kMaybe && random() % 6 == 0) continue;  // stride 0
    tensor.view.strides[d] = stride;
    if (random() % 5 == 0) {
      tensor.view.strides[d] = -stride;
      start += stride * std::max<int64_t>(shape[d] - 1, 0);
    }
    stride = stride * std::max<int64_t>(shape[d], 1) + (random() % 4 == 0 ? 3 : 0);
  }
  tensor.memory.resize(static_cast<size_t>(stride + 2) * itemsize);
  for (std::byte& byte : tensor.memory) byte = static_cast<std::byte>(random());
  tensor.view.data = tensor.memory.data() + static_cast<uint64_t>(start) * itemsize;
  return tensor;
}

// The address of each element in C order, by direct index arithmetic.
std::vector<std::byte*> addresses(const StridedView& view) {
  const Dims strides = contiguous_strides(view.shape);
  std::vector<std::byte*> all(static_cast<size_t>(numel(view.shape)));
  for (size_t i = 0; i < all.size(); ++i) {
    int64_t at = 0;
    for (size_t d = 0; d < view.shape.size(); ++d) {
      at += static_cast<int64_t>(i) / strides[d] % view.shape[d] * view.strides[d];
    }
    all[i] = view.data + at * static_cast<int64_t>(view.itemsize);
  }
  return all;
}

Bytes flattened(const StridedView& view) {
  Bytes flat;
  for (const std::byte* element : addresses(view)) {
    flat.insert(flat.end(), element, element + view.itemsize);
  }
  return flat;
}

// What `memory` contains after `flat` is written to the elements of the view.
void write_naively(const StridedView& view, const Bytes& flat) {
  size_t at = 0;
  for (std::byte* element : addresses(view)) {
    std::memcpy(element, flat.data() + at, view.itemsize);
    at += view.itemsize;
  }
}

constexpr uint64_t kItemSizes[] = {1, 2, 3, 4, 8, 12, 16, 24};

Dims random_shape(std::mt19937_64& random) {
  Dims shape;
  for (uint64_t n = random() % 6; n > 0; --n) {
    shape.push_back(random() % 12 == 0 ? 0 : 1 + static_cast<int64_t>(random() % 9));
  }
  if (!shape.empty() && random() % 4 == 0) shape[random() % shape.size()] = 70;
  return shape;
}

TEST(StridedCopy, CopiesEveryElementAndNothingElse) {
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    std::mt19937_64 random(seed);
    const Dims shape = random_shape(random);
    const uint64_t itemsize = kItemSizes[random() % std::size(kItemSizes)];
    const Tensor source = random_tensor(shape, itemsize, Repeats::kMaybe, random);
    Tensor target = random_tensor(shape, itemsize, Repeats::kNever, random);
    const Bytes before = target.memory;
    write_naively(target.view, flattened(source.view));
    const Bytes expected = target.memory;
    std::copy(before.begin(), before.end(), target.memory.begin());
    strided_copy(target.view, source.view);
    ASSERT_EQ(target.memory, expected) << "seed " << seed << " shape " << to_string(shape);
  }
}

TEST(StridedCopy, PacksAnyByteRange) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    std::mt19937_64 random(seed);
    const Dims shape = random_shape(random);
    const uint64_t itemsize = kItemSizes[random() % std::size(kItemSizes)];
    const Tensor source = random_tensor(shape, itemsize, Repeats::kMaybe, random);
    const Bytes flat = flattened(source.view);
    for (int round = 0; round < 4; ++round) {
      const uint64_t begin = random() % (flat.size() + 1);
      const uint64_t size = random() % (flat.size() - begin + 1);
      const Bytes expected(flat.begin() + static_cast<int64_t>(begin),
                           flat.begin() + static_cast<int64_t>(begin + size));
      Bytes packed(size);
      pack_range(source.view, begin, packed);
      ASSERT_EQ(packed, expected) << "seed " << seed << " [" << begin << ", +" << size << ")";
      std::fill(packed.begin(), packed.end(), std::byte{0});
      ASSERT_EQ(pack_range_crc32(source.view, begin, packed, 77), crc32(expected, 77));
      ASSERT_EQ(packed, expected);
    }
  }
}

TEST(StridedCopy, LongStridedMemoryIsChecksummedAcrossBlocks) {
  std::mt19937_64 random(6);
  Bytes memory(3 << 20);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  const StridedView view{memory.data(), {1024, 700}, {1, 1024}, 4};
  const Bytes flat = flattened(view);
  Bytes packed(flat.size() - 8);
  const uint32_t checksum = pack_range_crc32(view, 3, packed, 0);
  EXPECT_EQ(checksum, crc32(packed));
  EXPECT_TRUE(std::equal(packed.begin(), packed.end(), flat.begin() + 3));
}

TEST(StridedCopy, ContiguityIgnoresDimsOfOneAndEmptyTensors) {
  EXPECT_TRUE((StridedView{nullptr, {2, 1, 3}, {3, 99, 1}, 4}.is_contiguous()));
  EXPECT_FALSE((StridedView{nullptr, {2, 3}, {4, 1}, 4}.is_contiguous()));
  EXPECT_TRUE((StridedView{nullptr, {2, 0, 3}, {7, 5, 2}, 4}.is_contiguous()));
  EXPECT_TRUE((StridedView{nullptr, {}, {}, 4}.is_contiguous()));
}

TEST(StridedCopy, NarrowNamesTheBoxsElements) {
  Bytes memory(24);
  std::iota(reinterpret_cast<uint8_t*>(memory.data()),
            reinterpret_cast<uint8_t*>(memory.data()) + 24, uint8_t{0});
  const StridedView view = StridedView::contiguous(memory.data(), {4, 6}, 1);
  const StridedView part = view.narrow(Box{{1, 2}, {2, 3}});
  EXPECT_EQ(flattened(part), (Bytes{std::byte{8}, std::byte{9}, std::byte{10}, std::byte{14},
                                    std::byte{15}, std::byte{16}}));
  EXPECT_EQ(part.bytes(), 6u);
}

TEST(StridedCopy, MismatchesAndRangesOutsideAreDefects) {
  Bytes memory(64);
  const StridedView a = StridedView::contiguous(memory.data(), {4, 2}, 4);
  const StridedView b = StridedView::contiguous(memory.data() + 32, {2, 4}, 4);
  EXPECT_THROW(strided_copy(a, b), Error);
  EXPECT_THROW(strided_copy(a, StridedView::contiguous(b.data, {4, 2}, 2)), Error);
  Bytes out(9);
  EXPECT_THROW(pack_range(a, 24, out), Error);
  EXPECT_THROW(pack_range(a, UINT64_MAX - 3, out), Error);
  EXPECT_THROW(pack_range(a, 33, MutableByteView()), Error);
  EXPECT_THROW(pack_range_crc32(a, 24, out, 0), Error);
}

}  // namespace tilestone::strided_copy_test
