// Reads many tensors of an open checkpoint together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <random>

#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/fault_storage_testing.h"

namespace tilestone::read_many_test {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

// A checkpoint of `count` tensors of a few elements each.
Location save_many(int count) {
  std::mt19937_64 random(7);
  StateDict state;
  for (int i = 0; i < count; ++i) {
    const Dims shape = {static_cast<int64_t>(random() % 5), static_cast<int64_t>(random() % 90)};
    state["t" + std::to_string(i)] =
        counting(random() % 2 == 0 ? DType::kFloat32 : DType::kInt64, shape, i);
  }
  const Location location(memory_storage());
  save(state, location, {});
  return location;
}

TEST(ReadMany, EqualsReadingEach) {
  const Checkpoint checkpoint = Checkpoint::open(save_many(300));
  std::vector<std::string> keys = checkpoint.keys();
  std::mt19937_64 random(11);
  std::shuffle(keys.begin(), keys.end(), random);
  keys.push_back(keys.front());  // one key twice
  const std::vector<TensorView> tensors = checkpoint.read_many(keys);
  ASSERT_EQ(tensors.size(), keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const TensorView alone = checkpoint.read(keys[i]);
    EXPECT_EQ(tensors[i].dtype, alone.dtype);
    EXPECT_EQ(tensors[i].shape, alone.shape);
    EXPECT_EQ(elements(tensors[i]), elements(alone));
  }
  EXPECT_TRUE(checkpoint.read_many({}).empty());
}

TEST(ReadMany, SmallTensorsAreReadInFewLargeReads) {
  const Location saved = save_many(500);
  std::atomic<int> reads = 0;
  const auto disk = FaultDisk::create(saved.shared(), [&](const StorageCall& call) {
    reads += call.op == StorageOp::kRead;
    return FaultAction::pass();
  });
  const Checkpoint checkpoint = Checkpoint::open(Location(disk->storage(0)));
  const std::vector<std::string> keys = checkpoint.keys();
  reads = 0;
  checkpoint.read_many(keys);
  EXPECT_LE(reads, 20);
}

TEST(ReadMany, AKeyThatIsNotThereIsNamed) {
  const Checkpoint checkpoint = Checkpoint::open(save_many(3));
  const std::vector<std::string> keys = {"t0", "t9"};
  EXPECT_THAT(failures(1, [&](Communicator) { checkpoint.read_many(keys); }),
              Each(HasSubstr("key t9")));
}

TEST(Checkpoint, ABoxOutsideATensorAndAKeyOfTheOtherKindAreNamed) {
  StateDict state;
  state["w"] = TensorView::allocate(DType::kFloat32, {2, 3});
  state["step"] = 5;
  const Location location(memory_storage());
  save(state, location);
  const Checkpoint checkpoint = Checkpoint::open(location);
  const auto failure = [&](const std::function<void()>& read) {
    return failures(1, [&](Communicator) { read(); }).front();
  };
  EXPECT_THAT(failure([&] { checkpoint.read("w", Box{{1, 0}, {2, 3}}); }),
              AllOf(HasSubstr("dim 0 ends beyond"), HasSubstr("(key w)")));
  EXPECT_THAT(failure([&] { checkpoint.read("step"); }),
              HasSubstr("has an object under this key, no tensor (key step)"));
  EXPECT_THAT(failure([&] { checkpoint.read_object("w"); }),
              HasSubstr("has a tensor under this key, no object (key w)"));
  EXPECT_THAT(failure([&] { checkpoint.read_object("stop"); }),
              HasSubstr("nothing under this key (key stop); similar keys: step"));
}

}  // namespace tilestone::read_many_test
