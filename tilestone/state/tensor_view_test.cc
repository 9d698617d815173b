#include "tilestone/state/tensor_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <complex>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "tilestone/base/error_testing.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::tensor_view_test {

using testing::HasSubstr;

template <typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

TEST(TensorView, ContiguousRefusesWhatNoMemoryHolds) {
  float x = 0;
  EXPECT_THAT(error_of([&] { TensorView::contiguous(&x, DType::kFloat32, {2, -1}); }),
              Mentions("[2, -1]", "negative"));
  EXPECT_THAT(error_of([&] { TensorView::contiguous(nullptr, DType::kFloat32, {2}); }),
              Mentions("null", "[2]"));
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(error_of([&] { TensorView::contiguous(&x, DType::kUInt8, {huge, 2}); }),
              Mentions("2^63 - 1 elements"));
  EXPECT_THAT(error_of([&] { TensorView::contiguous(&x, DType::kComplex128, {huge}); }),
              HasSubstr("bytes of the tensor"));
}

TEST(TensorView, OfTakesTheDtypeFromTheElementsAndTheShapeAsGiven) {
  std::vector<int64_t> numbers = {1, 2, 3, 4, 5, 6};
  const TensorView view = TensorView::of(numbers, {2, 3});
  EXPECT_EQ(view.dtype, DType::kInt64);
  EXPECT_EQ(view.strides, Dims({3, 1}));
  EXPECT_EQ(static_cast<void*>(view.data), numbers.data());
  std::complex<float> one[1];
  EXPECT_EQ(TensorView::of(std::span(one), {}).dtype, DType::kComplex64);
  EXPECT_EQ(TensorView::of(std::span<double>(), {0, 4}).bytes(), 0u);
  EXPECT_THAT(error_of([&] { TensorView::of(numbers, {2, 2}); }),
              testing::AllOf(HasSubstr("[2, 2]"), HasSubstr("4"), HasSubstr("6")));
}

template <typename Elements>
concept Viewable =
    requires(Elements&& elements) { TensorView::of(std::forward<Elements>(elements), Dims()); };
static_assert(Viewable<std::vector<float>&> && Viewable<std::span<bool>>);
static_assert(!Viewable<std::vector<float>>);         // the view would dangle
static_assert(!Viewable<const std::vector<float>&>);  // a load would write to it
static_assert(!Viewable<std::vector<char>&> && !Viewable<std::vector<bool>&>);

TEST(TensorView, ElementsAreGivenOnlyAsTheyAre) {
  float memory[6] = {1, 2, 3, 4, 5, 6};
  const TensorView view = TensorView::of(memory, {2, 3});
  EXPECT_EQ(view.elements<float>().data(), memory);
  EXPECT_EQ(view.elements<float>().size(), 6u);
  EXPECT_THAT(error_of([&] { view.elements<int32_t>(); }),
              testing::AllOf(HasSubstr("float32"), HasSubstr("int32")));
  EXPECT_THAT(error_of([&] { view.narrow({{0, 1}, {2, 2}}).elements<float>(); }),
              HasSubstr("[3, 1]"));
  EXPECT_THAT(error_of([&] { TensorView::without_data(DType::kFloat32, {1}).elements<float>(); }),
              HasSubstr("has no data"));
}

TEST(TensorView, StridedRefusesToReachOutsideItsAllocation) {
  float memory[12] = {};
  const auto view = [&](void* data, Dims shape, Dims strides) {
    return TensorView::strided(data, DType::kFloat32, std::move(shape), std::move(strides), memory,
                               sizeof memory);
  };
  EXPECT_EQ(view(memory, {3, 4}, {4, 1}).bytes(), 48u);
  EXPECT_EQ(view(memory + 11, {12}, {-1}).bytes(), 48u);
  EXPECT_EQ(view(memory + 11, {1}, {1000}).bytes(), 4u);
  EXPECT_THAT(error_of([&] { view(memory, {3, 4}, {4, 2}); }),
              Mentions("[3, 4]", "[4, 2]", "float32", "[0, 60)", "48 bytes"));
  EXPECT_THAT(error_of([&] { view(memory + 1, {3, 4}, {4, 1}); }), HasSubstr("[4, 52)"));
  EXPECT_THAT(error_of([&] { view(memory, {2}, {-1}); }), HasSubstr("[-4, 4)"));
  EXPECT_THAT(error_of([&] { view(memory, {2}, {std::numeric_limits<int64_t>::max()}); }),
              HasSubstr("reach"));
  EXPECT_THAT(error_of([&] { view(memory, {3, 4}, {1}); }),
              Mentions("strides [1]", "shape [3, 4]"));
  EXPECT_THAT(error_of([&] { view(nullptr, {1}, {1}); }), HasSubstr("data is null"));
}

TEST(TensorView, TensorsWithoutElementsNeedNoMemory) {
  const TensorView empty = TensorView::contiguous(nullptr, DType::kFloat32, {0, 4});
  EXPECT_TRUE(empty.has_data());
  EXPECT_EQ(empty.bytes(), 0u);
  EXPECT_TRUE(TensorView::strided(nullptr, DType::kInt8, {0}, {7}, nullptr, 0).has_data());
  EXPECT_FALSE(TensorView::without_data(DType::kInt8, {1}).has_data());
}

TEST(TensorView, NarrowMovesToTheBoxAndKeepsStrides) {
  int32_t memory[12];
  for (int i = 0; i < 12; ++i) memory[i] = i;
  const TensorView whole = TensorView::contiguous(memory, DType::kInt32, {3, 4});
  const TensorView part = whole.narrow({{1, 2}, {2, 2}});
  EXPECT_EQ(part.shape, (Dims{2, 2}));
  EXPECT_EQ(part.strides, (Dims{4, 1}));
  int32_t first = 0;
  std::memcpy(&first, part.data, sizeof first);
  EXPECT_EQ(first, 6);
  EXPECT_EQ(part.strided_view().itemsize, 4u);
  EXPECT_THAT(error_of([&] { (void)whole.narrow({{2, 0}, {2, 4}}); }),
              HasSubstr("ends beyond the tensor"));
  EXPECT_FALSE(TensorView::without_data(DType::kInt32, {3, 4}).narrow({{1, 2}, {2, 2}}).has_data());
}

TEST(TensorView, AllocateGivesZeroedMemoryThatTheViewOwns) {
  TensorView view = TensorView::allocate(DType::kInt64, {2, 3});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % 64, 0U);
  const TensorView part = view.narrow({{1, 0}, {1, 3}});
  view = TensorView();  // the part keeps the memory alive
  for (size_t i = 0; i < part.bytes(); ++i) EXPECT_EQ(part.data[i], std::byte{0});
}

class FakeDevice : public DeviceMemory {
 public:
  explicit FakeDevice(Box box) : box_(std::move(box)) {}
  std::string device() const override { return "fake:" + to_string(box_); }
  std::unique_ptr<DeviceTransfer> submit(CopyTo, std::span<const DeviceCopy>) override {
    return nullptr;
  }
  std::shared_ptr<DeviceMemory> narrow(const Box& box) override {
    return std::make_shared<FakeDevice>(box);
  }

 private:
  Box box_;
};

TEST(TensorView, DeviceTensorsNarrowThroughTheirDeviceAndRefuseHostAccess) {
  TensorView view = TensorView::without_data(DType::kFloat32, {4, 4});
  view.device = std::make_shared<FakeDevice>(Box::whole({4, 4}));
  EXPECT_TRUE(view.has_data());
  const TensorView part = view.narrow({{0, 1}, {4, 2}});
  EXPECT_EQ(part.device->device(), "fake:[0:4, 1:3]");
  EXPECT_EQ(part.strides, (Dims{2, 1}));
  EXPECT_THROW((void)part.strided_view(), Error);
  EXPECT_EQ(view.narrow(Box::whole({4, 4})).device, view.device);
}

}  // namespace tilestone::tensor_view_test
