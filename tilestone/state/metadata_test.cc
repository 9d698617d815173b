#include "tilestone/state/metadata.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/error_testing.h"

namespace tilestone::metadata_test {

using testing::ElementsAre;
using testing::IsEmpty;

Metadata with_keys(const std::vector<std::string>& tensors,
                   const std::vector<std::string>& objects = {}) {
  Metadata metadata;
  for (const auto& key : tensors) {
    metadata.tensors.push_back({key, {}, DType::kInt16, {3, 2}, {}});
  }
  for (const auto& key : objects) metadata.objects.push_back({key, {}, {}});
  return metadata;
}

TEST(Metadata, FindsWhatItHoldsOnceIndexed) {
  Metadata metadata = with_keys({"b", "a", "c"}, {"z", "y"});
  metadata.index();
  EXPECT_EQ(metadata.tensors.front().key, "a");
  ASSERT_NE(metadata.find_tensor("b"), nullptr);
  EXPECT_EQ(metadata.find_tensor("b")->key, "b");
  EXPECT_EQ(metadata.find_tensor("z"), nullptr);
  EXPECT_NE(metadata.find_object("y"), nullptr);
  EXPECT_EQ(metadata.find_object("yy"), nullptr);
  EXPECT_EQ(metadata.tensor_bytes(), 36u);
}

TEST(Metadata, AKeyTwiceIsCorrupt) {
  const auto index_error = [](Metadata metadata) { return error_of([&] { metadata.index(); }); };
  EXPECT_THAT(index_error(with_keys({"a", "b", "a"})), IsError(ErrorCode::kCorrupt, "a", "twice"));
  EXPECT_THAT(index_error(with_keys({}, {"o", "o"})), IsError(ErrorCode::kCorrupt, "o", "twice"));
  EXPECT_THAT(index_error(with_keys({"a"}, {"a"})),
              IsError(ErrorCode::kCorrupt, "a", "twice", "tensor", "object"));
}

TEST(Metadata, HugeTensorsDoNotWrapTheTotal) {
  Metadata metadata = with_keys({"a", "b", "c"});
  for (StoredTensor& tensor : metadata.tensors) {
    tensor.shape = {int64_t{1} << 62};
    tensor.dtype = DType::kUInt16;
  }
  EXPECT_THROW((void)metadata.tensor_bytes(), Error);
}

TEST(SimilarKeys, AreFoundByEditsAndByComponents) {
  Metadata metadata = with_keys({"model.layers.0.weight", "model.layers.1.weight",
                                 "model.layers.0.bias", "optimizer.state.step"},
                                {"rng_state"});
  metadata.index();
  EXPECT_THAT(similar_keys(metadata, "model.layers.0.weigth"),
              ElementsAre("model.layers.0.weight", "model.layers.1.weight", "model.layers.0.bias"));
  EXPECT_THAT(similar_keys(metadata, "layers.0.bias", 1), ElementsAre("model.layers.0.bias"));
  EXPECT_THAT(similar_keys(metadata, "optimizer.state.step.value"),
              ElementsAre("optimizer.state.step"));
  EXPECT_THAT(similar_keys(metadata, "rng_stat"), ElementsAre("rng_state"));
  EXPECT_THAT(similar_keys(metadata, "something else"), IsEmpty());
  EXPECT_EQ(similar_keys_hint(metadata, "rng_stat"), "similar keys: rng_state");
  EXPECT_EQ(similar_keys_hint(metadata, "something else"), "");
  EXPECT_EQ(similar_keys_hint(metadata, "model.layers.0"),
            "there are keys below it, such as model.layers.0.bias");
  EXPECT_THAT(similar_keys(metadata, std::string(100'000, 'x')), IsEmpty());
}

}  // namespace tilestone::metadata_test
