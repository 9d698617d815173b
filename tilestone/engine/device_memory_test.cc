// Saves from and loads into memory that the CPU can't address.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "tilestone/comm/threads.h"
#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/geometry/strided_copy_testing.h"

namespace tilestone::device_memory_test {

// Memory without an address: the bytes of a TensorView of it are accessible only by calls.
class FarMemory final : public DeviceMemory {
 public:
  struct Calls {
    std::atomic<int> now{0};
    std::atomic<int> count{0};
    std::atomic<uint64_t> largest{0};  // bytes of the largest call
    std::atomic<bool> overlapped{false};
  };

  FarMemory(TensorView far, std::shared_ptr<Calls> calls)
      : far_(std::move(far)), calls_(std::move(calls)) {}

  std::string device() const override { return "far:0"; }
  void to_host(uint64_t begin, MutableByteView out) override {
    counted(out.size(), [&] { pack_range(far_.strided_view(), begin, out); });
  }
  void from_host(uint64_t begin, ByteView in) override {
    counted(in.size(), [&] { unpack_range(far_.strided_view(), begin, in); });
  }
  std::shared_ptr<DeviceMemory> narrow(const Box& box) override {
    return std::make_shared<FarMemory>(far_.narrow(box), calls_);
  }

 private:
  template <typename Body>
  void counted(uint64_t bytes, const Body& body) {
    if (++calls_->now > 1) calls_->overlapped = true;
    ++calls_->count;
    calls_->largest = std::max<uint64_t>(calls_->largest, bytes);
    body();
    --calls_->now;
  }

  TensorView far_;
  std::shared_ptr<Calls> calls_;
};

struct Far {
  TensorView content;  // accessible only to the test
  std::shared_ptr<FarMemory::Calls> calls = std::make_shared<FarMemory::Calls>();

  explicit Far(TensorView content_in) : content(std::move(content_in)) {}
  TensorView view() const {
    TensorView view = TensorView::without_data(content.dtype, content.shape);
    view.device = std::make_shared<FarMemory>(content, calls);
    return view;
  }
};

constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 1250;

TensorView whole() { return counting(DType::kFloat32, {kRows, kColumns}); }

void save_columns(const Location& location) {
  run_ranks(2, [&](Communicator comm) {
    const Box box{{0, comm.rank() * kColumns / 2}, {kRows, kColumns / 2}};
    const Far far(whole().narrow(box));  // not contiguous
    StateDict state;
    state["w"] = ShardedTensor::from_box("w", far.view(), {kRows, kColumns}, box);
    SaveOptions options;
    options.comm = comm;
    options.resources.buffer_bytes = 1u << 20;
    save(state, location, options);
    EXPECT_GT(far.calls->count, 0);
    EXPECT_FALSE(far.calls->overlapped);
  });
}

LoadOptions loading(const Communicator& comm) {
  LoadOptions options;
  options.comm = comm;
  options.resources.buffer_bytes = 1u << 20;
  options.resources.threads = 3;
  return options;
}

void expect_loaded(const Location& location, int ranks, const std::function<Box(int)>& box_of) {
  run_ranks(ranks, [&](Communicator comm) {
    const Box box = box_of(comm.rank());
    const Far far(TensorView::allocate(DType::kFloat32, box.shape));
    StateDict wanted;
    wanted["w"] = ShardedTensor::from_box("w", far.view(), {kRows, kColumns}, box);
    load(wanted, location, loading(comm));
    EXPECT_EQ(elements(far.content), elements(whole().narrow(box)));
    EXPECT_FALSE(far.calls->overlapped);
    EXPECT_LE(far.calls->largest, 1u << 20);  // copied in blocks
  });
}

TEST(DeviceMemory, WhatIsSavedFromItIsReadWithoutIt) {
  const Location location(memory_storage());
  save_columns(location);
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_TRUE(checkpoint.verify().ok());
  EXPECT_EQ(elements(checkpoint.read("w")), elements(whole()));
}

TEST(DeviceMemory, IsFilledWithTheSameBoxesAsSaved) {
  const Location location(memory_storage());
  save_columns(location);
  expect_loaded(location, 2,
                [](int rank) { return Box{{0, rank * kColumns / 2}, {kRows, kColumns / 2}}; });
}

TEST(DeviceMemory, IsFilledWithOtherBoxesThanSaved) {
  const Location location(memory_storage());
  save_columns(location);
  expect_loaded(location, 4,
                [](int rank) { return Box{{rank * kRows / 4, 0}, {kRows / 4, kColumns}}; });
  expect_loaded(location, 1, [](int) { return Box::whole({kRows, kColumns}); });
}

TEST(DeviceMemory, TakesFlatRangesOfATensor) {
  const Location location(memory_storage());
  save_columns(location);
  const int64_t begin = kColumns + 17, end = 5 * kColumns + 3;
  const Far far(TensorView::allocate(DType::kFloat32, {end - begin}));
  StateDict wanted;
  wanted["w"] =
      ShardedTensor::from_rank_offsets_flat("w", far.view(), {kRows, kColumns}, {begin, end}, {});
  load(wanted, location, loading(Communicator()));
  EXPECT_EQ(elements(far.content), elements(counting(DType::kFloat32, {end - begin}, begin)));
}

TEST(DeviceMemory, GivesAndTakesFlatRangesOnOtherRanks) {
  const Location location(memory_storage());
  const auto state_of = [](const Far& far, FlatRange range) {
    StateDict state;
    state["w"] = ShardedTensor::from_rank_offsets_flat("w", far.view(), {3, 4, 5}, range, {});
    return state;
  };
  const auto range_of = [](int rank, int ranks) {
    return FlatRange{60 * rank / ranks, 60 * (rank + 1) / ranks};
  };
  run_ranks(7, [&](Communicator comm) {
    const FlatRange range = range_of(comm.rank(), 7);
    const Far far(counting(DType::kFloat32, {range.end - range.begin}, range.begin));
    SaveOptions options;
    options.comm = comm;
    save(state_of(far, range), location, options);
  });
  EXPECT_EQ(elements(Checkpoint::open(location).read("w")),
            elements(counting(DType::kFloat32, {3, 4, 5})));
  run_ranks(4, [&](Communicator comm) {
    const FlatRange range = range_of(comm.rank(), 4);
    const Far far(TensorView::allocate(DType::kFloat32, {range.end - range.begin}));
    load(state_of(far, range), location, loading(comm));
    EXPECT_EQ(elements(far.content),
              elements(counting(DType::kFloat32, {range.end - range.begin}, range.begin)));
  });
}

TEST(DeviceMemory, TakesElementsThatAreCastOnTheWay) {
  const Location location(memory_storage());
  save_columns(location);
  const Far far(TensorView::allocate(DType::kFloat64, {kRows, kColumns}));
  StateDict wanted;
  wanted["w"] = far.view();
  LoadOptions options = loading(Communicator());
  options.cast = true;
  load(wanted, location, options);
  const auto* loaded = reinterpret_cast<const double*>(far.content.data);
  for (int64_t i = 0; i < kRows * kColumns; ++i) ASSERT_EQ(loaded[i], static_cast<double>(i));
}

TEST(DeviceMemory, IsZeroFilledWhereTheStoredTensorIsSmaller) {
  const Location location(memory_storage());
  save_columns(location);
  const Far far(counting(DType::kFloat32, {kRows + 3, kColumns}, 1 << 20));
  StateDict wanted;
  ShardedTensor tensor = ShardedTensor::from_rank_offsets("w", far.view(), {});
  tensor.allow_shape_mismatch = true;
  wanted["w"] = tensor;
  load(wanted, location, loading(Communicator()));
  const Bytes loaded = elements(far.content), stored = elements(whole());
  EXPECT_TRUE(std::equal(stored.begin(), stored.end(), loaded.begin()));
  EXPECT_TRUE(std::all_of(loaded.begin() + static_cast<std::ptrdiff_t>(stored.size()), loaded.end(),
                          [](std::byte b) { return b == std::byte{0}; }));
}

TEST(DeviceMemory, IsReadIntoWithoutATemplate) {
  const Location location(memory_storage());
  save_columns(location);
  const Box box{{3, 600}, {40, 100}};
  const Far far(TensorView::allocate(DType::kFloat32, box.shape));
  Checkpoint::open(location).read_into("w", box, far.view());
  EXPECT_EQ(elements(far.content), elements(whole().narrow(box)));
}

}  // namespace tilestone::device_memory_test
