#include "tilestone/engine/read/as_stored_internal.h"

#include <gtest/gtest.h>

namespace tilestone::engine::as_stored_test {

bool is_null(const StateNode* node) {
  const auto* value = node->get_if<Value>();
  return value != nullptr && value->is_null();
}

TEST(AsStored, PlainTensorsAndListsThatAreStoredAsObjectsAreWantedAsObjects) {
  const TensorView tensor = TensorView::without_data(DType::kFloat32, {2});
  Metadata stored;
  for (const char* key : {"a.object", "list", "other.0"}) stored.objects.push_back({key, {}, {}});
  stored.tensors.push_back({"a.tensor", {}, DType::kFloat32, {2}, {}});
  stored.index();
  StateDict a, wanted;
  a["object"] = tensor;
  a["tensor"] = tensor;
  a["neither"] = tensor;
  wanted["a"] = std::move(a);
  wanted["list"] = StateList{StateNode(tensor), StateNode(tensor)};
  wanted["other"] = StateList{StateNode(tensor), StateNode(tensor)};
  const StateDict made = as_stored(wanted, stored);
  const auto& inner = *made.find("a")->get_if<StateDict>();
  EXPECT_TRUE(is_null(inner.find("object")));
  EXPECT_NE(inner.find("tensor")->get_if<TensorView>(), nullptr);
  EXPECT_NE(inner.find("neither")->get_if<TensorView>(), nullptr);
  EXPECT_TRUE(is_null(made.find("list")));
  const auto& other = *made.find("other")->get_if<StateList>();
  EXPECT_TRUE(is_null(&other[0]));
  EXPECT_NE(other[1].get_if<TensorView>(), nullptr);
}

}  // namespace tilestone::engine::as_stored_test
