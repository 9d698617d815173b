#include "tilestone/engine/run/inventory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/error.h"
#include "tilestone/engine/engine_testing.h"
#include "tilestone/storage/storage_testing.h"

namespace tilestone::inventory_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// "w" is sharded over four ranks, "b" is rank 1's.
Inventory four_ranks() {
  Inventory held;
  held.tensors["w"] = {DType::kFloat32, {8, 4}, {0, 1, 2, 3}};
  held.tensors["b"] = {DType::kFloat32, {4}, {1}};
  held.objects = {"step", "rng"};
  held.bytes = {32, 48, 32, 32};
  return held;
}

TEST(Losses, OfNothingAreNone) {
  EXPECT_THAT(losses(four_ranks(), four_ranks()), IsEmpty());
  Inventory more = four_ranks();
  more.tensors["c"] = {DType::kFloat32, {1}, {2}};
  more.tensors["b"].shape = {5};
  more.bytes = {0, 0, 0, 200};  // who writes what may change
  EXPECT_THAT(losses(four_ranks(), more), IsEmpty());
  EXPECT_THAT(losses(Inventory{}, four_ranks()), IsEmpty());
}

TEST(Losses, NameMissingKeys) {
  Inventory now = four_ranks();
  now.objects.erase("rng");
  EXPECT_THAT(losses(four_ranks(), now), ElementsAre("the key rng is missing"));
  now.tensors.erase("b");
  now.bytes[1] = 32;
  EXPECT_THAT(losses(four_ranks(), now),
              ElementsAre("2 keys are missing: b, rng",
                          "rank 1 wrote 48 bytes of tensors before and 32 now"));
}

TEST(Losses, NameAFewOfManyKeys) {
  Inventory before;
  for (int i = 10; i < 30; ++i) before.objects.insert("k" + std::to_string(i));
  EXPECT_THAT(
      losses(before, {}),
      ElementsAre("20 keys are missing: k10, k11, k12, k13, k14, k15, k16, k17 and 12 more"));
}

TEST(Losses, ALeafThatBecameAContainerIsNoMissingKey) {
  Inventory before, now;
  before.objects = {"none", "list", "value"};
  now.objects = {"none.a", "list.0.a"};
  now.empty_dicts = {"value"};
  EXPECT_THAT(losses(before, now), IsEmpty());
}

TEST(Losses, AnObjectInPlaceOfATensorIsNoMissingKey) {
  Inventory now = four_ranks();
  now.tensors.erase("b");
  now.objects.insert("b");
  EXPECT_THAT(losses(four_ranks(), now), IsEmpty());
}

TEST(Losses, NameAnEmptyDictThatIsMissing) {
  Inventory before = four_ranks();
  before.empty_dicts = {"state", "state.inner"};
  EXPECT_THAT(losses(before, before), IsEmpty());
  Inventory now = four_ranks();
  EXPECT_THAT(losses(before, now), ElementsAre("2 keys are missing: state, state.inner"));
  now.tensors["state.inner.0"] = {DType::kFloat32, {1}, {2}};  // it has got keys
  EXPECT_THAT(losses(before, now), IsEmpty());
  now.tensors.erase("state.inner.0");
  now.objects = {"state", "state.inner", "step", "rng"};
  EXPECT_THAT(losses(before, now), IsEmpty());
}

TEST(Losses, NameTensorsWithFewerBytes) {
  Inventory now = four_ranks();
  now.tensors["w"].shape = {6, 4};
  now.tensors["b"].dtype = DType::kBFloat16;
  EXPECT_THAT(losses(four_ranks(), now),
              ElementsAre("b has fewer bytes: it was float32 [4] and is bfloat16 [4]",
                          "w has fewer bytes: it was float32 [8, 4] and is float32 [6, 4]"));
}

TEST(Losses, NameATensorOfAllRanksThatOneRankWrites) {
  Inventory now = four_ranks();
  now.tensors["w"].writers = {2};
  EXPECT_THAT(
      losses(four_ranks(), now),
      ElementsAre("w holds only what rank 2 has, and before all 4 ranks wrote a part of it"));
  now.bytes.resize(2);  // a job of another size
  EXPECT_THAT(losses(four_ranks(), now), IsEmpty());
}

TEST(ComparingWithTheStepBefore, WarnsOrRefuses) {
  RunStep step{{}, "step 20", std::make_shared<Inventory>(four_ranks()), "step 10"};
  Inventory now = four_ranks();
  now.objects.erase("rng");
  {
    const LoggedWarnings warnings;
    compare_with_before(step, now);
    EXPECT_THAT(warnings.texts(),
                ElementsAre("step 20 lacks something that step 10 has: the key rng is missing"));
  }
  step.strict = true;
  expect_error([&] { compare_with_before(step, now); }, ErrorCode::kMismatch,
               "step 20 lacks something that step 10 has");
}

}  // namespace tilestone::inventory_test
