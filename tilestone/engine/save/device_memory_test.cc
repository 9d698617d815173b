// Saves from and loads into memory that the CPU can't address.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "tilestone/comm/threads_testing.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/engine/save/save_steps_testing.h"
#include "tilestone/engine/session.h"
#include "tilestone/state/device_memory_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::device_memory_test {

// A tensor on a device, whose elements only the test can reach.
struct Far {
  TensorView content;
  std::shared_ptr<LateDevice> device;
  TensorView view;

  explicit Far(TensorView content_in, std::shared_ptr<LateDevice> on = LateDevice::create())
      : content(std::move(content_in)), device(std::move(on)), view(device->put(content)) {}
};

constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 1250;

TensorView whole() { return counting(DType::kFloat32, {kRows, kColumns}); }

void save_columns(const Location& location) {
  run_ranks(2, [&](Communicator comm) {
    const Box box{{0, comm.rank() * kColumns / 2}, {kRows, kColumns / 2}};
    const Far far(whole().narrow(box));  // not contiguous
    StateDict state;
    state["w"] = ShardedTensor::from_box("w", far.view, {kRows, kColumns}, box);
    SaveOptions options;
    options.comm = comm;
    options.resources.buffer_bytes = 1u << 20;
    save(state, location, options);
    EXPECT_EQ(far.device->bytes, box.numel() * 4u);
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
    wanted["w"] = ShardedTensor::from_box("w", far.view, {kRows, kColumns}, box);
    load(wanted, location, loading(comm));
    EXPECT_EQ(elements(far.content), elements(whole().narrow(box)));
    EXPECT_EQ(far.device->bytes, box.numel() * 4u);
    EXPECT_EQ(far.device->waits, far.device->batches);
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
      ShardedTensor::from_rank_offsets_flat("w", far.view, {kRows, kColumns}, {begin, end}, {});
  load(wanted, location, loading(Communicator()));
  EXPECT_EQ(elements(far.content), elements(counting(DType::kFloat32, {end - begin}, begin)));
}

TEST(DeviceMemory, GivesAndTakesFlatRangesOnOtherRanks) {
  const Location location(memory_storage());
  const auto state_of = [](const Far& far, FlatRange range) {
    StateDict state;
    state["w"] = ShardedTensor::from_rank_offsets_flat("w", far.view, {3, 4, 5}, range, {});
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
  wanted["w"] = far.view;
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
  ShardedTensor tensor = ShardedTensor::from_rank_offsets("w", far.view, {});
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
  Checkpoint::open(location).read_into("w", box, far.view);
  EXPECT_EQ(elements(far.content), elements(whole().narrow(box)));
}

// ---- Batches

constexpr uint64_t kBuffer = 64u << 10;  // bytes: the smallest buffers

// A state of `large` tensors of 1 MiB and `small` ones of 40 bytes on a device.
StateDict state_on(LateDevice& device, int large, int small) {
  StateDict state;
  for (int i = 0; i < large; ++i) {
    state["large" + std::to_string(i)] = device.put(counting(DType::kFloat32, {1 << 18}, i));
  }
  for (int i = 0; i < small; ++i) {
    state["small" + std::to_string(i)] = device.put(counting(DType::kFloat32, {10}, 100 * i));
  }
  return state;
}

void expect_saved(const Location& location, int large, int small) {
  const Checkpoint checkpoint = Checkpoint::open(location);
  EXPECT_TRUE(checkpoint.verify().ok());
  for (int i = 0; i < large; ++i) {
    EXPECT_EQ(elements(checkpoint.read("large" + std::to_string(i))),
              elements(counting(DType::kFloat32, {1 << 18}, i)));
  }
  for (int i = 0; i < small; ++i) {
    EXPECT_EQ(elements(checkpoint.read("small" + std::to_string(i))),
              elements(counting(DType::kFloat32, {10}, 100 * i)));
  }
}

SaveOptions with_buffers(uint64_t bytes) {
  SaveOptions options;
  options.resources.threads = 2;
  options.resources.buffer_bytes = bytes;
  return options;
}

TEST(DeviceBatches, ASaveFetchesFullBuffersAheadOfWhatItWritesFromPinnedMemory) {
  for (const bool on_disk : {false, true}) {
    const auto device = LateDevice::create();
    const TempDirectory folder;
    const Location location = on_disk ? Location(folder.path() + "/a") : memory_storage();
    save(state_on(*device, 3, 1000), location, with_buffers(8 * kBuffer));
    expect_saved(location, 3, 1000);
    // 3 MiB in 48 buffers, and 40,000 bytes in one.
    EXPECT_EQ(device->batches, 49u);
    EXPECT_EQ(device->copies, 48u + 1000);
    EXPECT_EQ(device->waits, 49u);
    // Other batches were submitted before each wait but the last. (A disk may hold the buffers.)
    EXPECT_TRUE(on_disk || device->idle_waits == 1u) << device->idle_waits;
    EXPECT_EQ(device->unpinned, 0u);
    EXPECT_LE(device->pins, 8u);
    EXPECT_EQ(device->pinned, 0u);  // with the save its buffers have gone
    EXPECT_EQ(device->tensors, 0u);
  }
}

TEST(DeviceBatches, StagedTensorsAreFetchedTogetherIntoThePinnedMemoryOfTheSession) {
  const auto device = LateDevice::create();
  Session session;
  const auto save_staged = [&] {
    const Location location(memory_storage());
    std::optional<SteppedSave> staged;
    {
      const StateDict state = state_on(*device, 3, 3000);
      staged = begin_save(session, state, location, with_buffers(1u << 20)).stage();
    }
    EXPECT_EQ(device->tensors, 0u);
    staged->write().report().publish();
    expect_saved(location, 3, 3000);
  };
  session.prepare(state_on(*device, 3, 3000));
  EXPECT_EQ(device->copies, 0u);
  EXPECT_EQ(device->pins, 1u);
  for (uint64_t saves = 1; saves <= 2; ++saves) {
    save_staged();
    EXPECT_EQ(device->copies, saves * 3003);
    EXPECT_EQ(device->batches, saves * 3);  // of at most 1024 copies
    EXPECT_EQ(device->waits, saves * 3);
    EXPECT_EQ(device->unpinned, 0u);
    EXPECT_EQ(device->pins, 1u);
  }
}

TEST(DeviceBatches, TensorsAreKeptUntilTheyAreCopied) {
  const auto device = LateDevice::create();
  const Location location(memory_storage());
  std::optional<StateDict> state = state_on(*device, 2, 2);
  SteppedSave planned = begin_save(*state, location, with_buffers(1u << 20));
  state.reset();
  EXPECT_EQ(device->tensors, 4u);
  planned.write().report().publish();
  EXPECT_EQ(device->tensors, 0u);
  expect_saved(location, 2, 2);
}

TEST(DeviceBatches, ALoadWritesFullBlocksFromPinnedMemoryWhileItReads) {
  const Location location(memory_storage());
  const int large = 80, small = 1000;
  {
    const auto device = LateDevice::create();
    save(state_on(*device, large, small), location);
  }
  const auto device = LateDevice::create();
  std::map<std::string, TensorView> contents;
  StateDict wanted;
  const auto want = [&](const std::string& key, const Dims& shape) {
    contents[key] = TensorView::allocate(DType::kFloat32, shape);
    wanted[key] = device->put(contents[key]);
  };
  for (int i = 0; i < large; ++i) want("large" + std::to_string(i), {1 << 18});
  for (int i = 0; i < small; ++i) want("small" + std::to_string(i), {10});
  LoadOptions options;
  options.resources.threads = 3;
  load(wanted, location, options);
  for (int i = 0; i < large; ++i) {
    EXPECT_EQ(elements(contents["large" + std::to_string(i)]),
              elements(counting(DType::kFloat32, {1 << 18}, i)));
  }
  for (int i = 0; i < small; ++i) {
    EXPECT_EQ(elements(contents["small" + std::to_string(i)]),
              elements(counting(DType::kFloat32, {10}, 100 * i)));
  }
  EXPECT_EQ(device->bytes, (80u << 20) + 40'000u);
  // Blocks of 8 MiB, of which each of 3 threads begins one; and a copy per tensor that a block
  // holds, if no other thread reads a part of it.
  EXPECT_LE(device->batches, 16u);
  EXPECT_LE(device->copies, 1300u);
  EXPECT_EQ(device->waits, device->batches);
  EXPECT_LE(device->idle_waits, 1u);
  EXPECT_EQ(device->unpinned, 0u);
  EXPECT_EQ(device->pinned, 0u);
}

TEST(DeviceBatches, ACopyThatFailsEndsTheCallAndFreesEverything) {
  for (const uint64_t failing : {0, 1, 20}) {
    const auto device = LateDevice::create();
    const Location location(memory_storage());
    const auto expect_failure = [&](const std::function<void()>& call) {
      device->fail_at = device->batches + failing;
      try {
        call();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "the device is gone");
      }
      device->fail_at = ~uint64_t{0};
      EXPECT_EQ(device->tensors, 0u);
      EXPECT_EQ(device->pinned, 0u);
    };
    expect_failure([&] { save(state_on(*device, 3, 10), location, with_buffers(8 * kBuffer)); });
    save(state_on(*device, 3, 10), location, with_buffers(8 * kBuffer));
    if (failing > 0) continue;
    expect_failure([&] { load(state_on(*device, 3, 10), location, loading(Communicator())); });
    expect_failure([&] { begin_save(state_on(*device, 3, 10), memory_storage()).stage(); });
  }
}

TEST(DeviceBatches, SeveralDevicesTakePartInOneSaveAndOneLoad) {
  const auto first = LateDevice::create("late:0"), second = LateDevice::create("late:1");
  const Location location(memory_storage());
  const TensorView a = counting(DType::kFloat32, {1000}), b = counting(DType::kInt64, {3, 5}, 7);
  StateDict state;
  state["a"] = first->put(a);
  state["b"] = second->put(b);
  state["c"] = b;
  save(state, location);
  EXPECT_EQ(first->copies, 1u);
  EXPECT_EQ(second->copies, 1u);
  const TensorView to_a = TensorView::allocate(DType::kFloat32, {1000});
  const TensorView to_b = TensorView::allocate(DType::kInt64, {3, 5});
  StateDict wanted;
  wanted["a"] = second->put(to_a);
  wanted["b"] = first->put(to_b);
  load(wanted, location);
  EXPECT_EQ(elements(to_a), elements(a));
  EXPECT_EQ(elements(to_b), elements(b));
}

}  // namespace tilestone::device_memory_test
