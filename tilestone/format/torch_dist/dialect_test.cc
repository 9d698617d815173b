// Tests PyTorch's dialect: keys and paths as made by torch's flatten_state_dict, and back.
#include <gtest/gtest.h>

#include "tilestone/base/error.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/torch_dist/checkpoint_testing.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone::torch_dist::dialect_test {

TensorView tensor() { return TensorView::allocate(DType::kFloat32, {2}); }

Items to_items(const StateDict& state) {
  return pytorch_dialect()->to_items(state, *torch_dist_format());
}

std::vector<std::string> keys(const StateDict& state) {
  std::vector<std::string> all;
  const Items items = to_items(state);
  for (const TensorItem& item : items.tensors) all.push_back(item.key);
  for (const ObjectItem& item : items.objects) all.push_back(item.key);
  return all;
}

using Keys = std::vector<std::string>;

TEST(TorchDialect, DictsAreTakenApartAndKeysJoined) {
  StateDict inner;
  inner[int64_t{3}] = tensor();
  StateDict state;
  state["a"] = inner;
  state["empty"] = StateDict();
  EXPECT_EQ(keys(state), (Keys{"a.3"}));
  // An int key becomes text, as with str(key). Only a list's index stays a number.
  EXPECT_EQ(to_items(state).tensors[0].path, (Path{std::string("a"), std::string("3")}));
}

TEST(TorchDialect, ListsAreTakenApartOnlyForTensorsAndDicts) {
  StateDict state;
  state["plain"] = StateList{StateNode(1), StateNode(StateList{StateNode("x")})};
  state["tensors"] = StateList{StateNode(1), StateNode(tensor())};
  state["deep"] = StateList{StateNode(StateList{StateNode(tensor())})};
  StateDict dict;
  dict["k"] = 1;
  state["dicts"] = StateList{StateNode(dict)};
  EXPECT_EQ(keys(state), (Keys{"tensors.1", "deep.0.0", "plain", "tensors.0", "dicts.0.k"}));
  EXPECT_EQ(to_items(state).tensors[0].path, (Path{std::string("tensors"), int64_t{1}}));
}

TEST(TorchDialect, ValuesFollowTheSameRules) {
  StateDict state;
  state["d"] = Value::dict({{"a", 1}, {2, Value::list({1, 2})}, {true, Value::list({tensor()})}});
  state["t"] = Value::tuple({tensor(), Value::dict({{"a", 1}})});
  EXPECT_EQ(keys(state), (Keys{"d.True.0", "d.a", "d.2", "t"}));
}

TEST(TorchDialect, OneKeyTwiceIsRefused) {
  StateDict inner;
  inner["b"] = 1;
  StateDict state;
  state["a"] = inner;
  state["a.b"] = 2;
  try {
    to_items(state);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.key(), "a.b");
  }
}

TEST(TorchDialect, EntitiesKeepTheirOwnKeys) {
  StateDict state;
  state["x"] = ShardedTensor::from_box("w", tensor(), {4}, {{0}, {2}});
  state["y"] = ShardedTensor::from_box("w", tensor(), {4}, {{2}, {2}});
  state["z"] = ShardedTensor::from_box("z", tensor(), {2}, {{0}, {2}});
  state["o"] = ShardedObject::make("obj", Value(1), {2, 2}, {0, 1});
  const Items items = to_items(state);
  ASSERT_EQ(items.tensors.size(), 3u);
  EXPECT_EQ(items.tensors[0].key, "w");
  EXPECT_EQ(items.tensors[1].key, "w");
  EXPECT_TRUE(items.tensors[0].path.empty());
  EXPECT_EQ(items.tensors[2].path, (Path{std::string("z")}));
  EXPECT_EQ(items.objects[0].key, "obj/shard_0.1_2.2");
  EXPECT_FALSE(items.objects[0].common);
}

TEST(TorchDialect, AnEntityAndALeafOfOneKeyAreRefused) {
  StateDict state;
  state["w"] = tensor();
  state["x"] = ShardedTensor::from_box("w", tensor(), {4}, {{0}, {2}});
  EXPECT_THROW(to_items(state), Error);
}

TEST(TorchDialect, ItemsGoBackToTheirPlaces) {
  StateDict inner;
  inner["x"] = 1;
  StateDict state;
  state["t"] = tensor();
  state["list"] = StateList{StateNode(tensor()), StateNode(inner), StateNode("s")};
  state["plain"] = StateList{StateNode(1), StateNode(2)};
  state["value"] = Value::dict({{"k", Value::list({1, tensor()})}});
  state["o"] = ShardedObject::make("obj", Value(1), {1}, {0});
  state["sharded"] = ShardedTensor::from_box("w", TensorView::without_data(DType::kFloat32, {2}),
                                             {1, 4}, {{0, 0}, {1, 2}}, {}, 1);
  state["empty"] = StateDict();
  Items items = to_items(state);
  for (ObjectItem& item : items.objects) item.value = Value("loaded " + item.key);
  for (TensorItem& item : items.tensors) {
    if (item.key == "w") item.pieces[0].data = TensorView::allocate(DType::kFloat32, {1, 2});
  }
  const StateDict loaded = pytorch_dialect()->from_items(state, items);

  const auto text = [](const StateNode* node) { return to_string(*node->get_if<Value>()); };
  const auto& list = *loaded.find(std::string("list"))->get_if<StateList>();
  EXPECT_NE(list[0].get_if<TensorView>(), nullptr);
  EXPECT_EQ(text(list[1].get_if<StateDict>()->find(std::string("x"))), "'loaded list.1.x'");
  EXPECT_EQ(text(&list[2]), "'loaded list.2'");
  EXPECT_EQ(text(loaded.find(std::string("plain"))), "'loaded plain'");
  const Value& value = *loaded.find(std::string("value"))->get_if<Value>();
  EXPECT_EQ(to_string(value.find("k")->items()[0]), "'loaded value.k.0'");
  EXPECT_EQ(value.find("k")->items()[1].kind(), Value::Kind::kTensor);
  EXPECT_EQ(to_string(loaded.find(std::string("o"))->get_if<ShardedObject>()->data),
            "'loaded obj/shard_0_1'");
  const auto& sharded = *loaded.find(std::string("sharded"))->get_if<ShardedTensor>();
  EXPECT_EQ(sharded.data.shape, Dims{2});  // without the prepended axis
  EXPECT_EQ(sharded.data.data, sharded.pieces[0].data.data);
  EXPECT_TRUE(loaded.find(std::string("empty"))->get_if<StateDict>()->empty());
}

TEST(TorchDialect, AWholeCheckpointReadsBack) {
  StateDict inner;
  inner["w"] = tensor();
  inner["lr"] = 0.5;
  StateDict state;
  state["m"] = inner;
  state["x"] = ShardedTensor::from_box("s", tensor(), {4}, {{0}, {2}});
  state["y"] = ShardedTensor::from_box("s", tensor(), {4}, {{2}, {2}});
  const auto format = torch_dist_format();
  const FileImage files = write_checkpoint(*format, state, "id");
  const Metadata metadata = parse(*format, files);
  EXPECT_EQ(metadata.save_id, "id");
  ASSERT_NE(metadata.find_tensor("s"), nullptr);
  EXPECT_EQ(metadata.find_tensor("s")->chunks.size(), 2u);
  EXPECT_EQ(metadata.find_tensor("m.w")->path, (Path{std::string("m"), std::string("w")}));
  const StoredObject* lr = metadata.find_object("m.lr");
  ASSERT_NE(lr, nullptr);
  const ByteView file = files.at(metadata.files[lr->at.file]);
  EXPECT_EQ(format->parse_object(file.subspan(lr->at.offset, lr->at.length)).as_float(), 0.5);
}

}  // namespace tilestone::torch_dist::dialect_test
