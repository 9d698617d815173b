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
  KindsByKey replaced;
  const StateDict made = as_stored(wanted, stored, replaced);
  const auto& inner = *made.find("a")->get_if<StateDict>();
  EXPECT_TRUE(is_null(inner.find("object")));
  EXPECT_NE(inner.find("tensor")->get_if<TensorView>(), nullptr);
  EXPECT_NE(inner.find("neither")->get_if<TensorView>(), nullptr);
  EXPECT_TRUE(is_null(made.find("list")));
  const auto& other = *made.find("other")->get_if<StateList>();
  EXPECT_TRUE(is_null(&other[0]));
  EXPECT_NE(other[1].get_if<TensorView>(), nullptr);
}

TEST(AsStored, DictsOfValuesThatPyTorchUpTo23StoredAsObjectsAreWantedAsObjects) {
  Metadata stored;
  for (const char* key : {"scheduler", "empty", "mixed", "a.inner", "parts", "parts.x"}) {
    stored.objects.push_back({key, {}, {}});
  }
  stored.index();
  StateDict scheduler, inner, a, mixed, wanted;
  scheduler["step"] = Value(3);
  scheduler["rates"] = StateList{StateNode(StateDict())};
  wanted["scheduler"] = scheduler;
  wanted["empty"] = StateDict();
  inner["b"] = Value(1);
  a["inner"] = inner;
  a["other"] = scheduler;
  wanted["a"] = std::move(a);
  mixed["tensor"] = TensorView::without_data(DType::kFloat32, {2});
  wanted["mixed"] = std::move(mixed);
  StateDict parts;
  parts["x"] = Value(1);
  wanted["parts"] = std::move(parts);
  KindsByKey replaced;
  const StateDict made = as_stored(wanted, stored, replaced);
  EXPECT_TRUE(is_null(made.find("scheduler")));
  EXPECT_TRUE(is_null(made.find("empty")));
  const auto& outer = *made.find("a")->get_if<StateDict>();
  EXPECT_TRUE(is_null(outer.find("inner")));
  EXPECT_EQ(outer.find("other")->get_if<StateDict>()->size(), 2u);
  EXPECT_NE(made.find("mixed")->get_if<StateDict>(), nullptr);
  EXPECT_NE(made.find("parts")->get_if<StateDict>(), nullptr);
}

}  // namespace tilestone::engine::as_stored_test
