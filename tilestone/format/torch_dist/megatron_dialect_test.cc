// Tests Megatron-Core's dialect: splitting a tree into sharded and common parts, and merging them.
#include <gtest/gtest.h>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone::torch_dist::megatron_dialect_test {

TensorView tensor() { return TensorView::allocate(DType::kFloat32, {2}); }
ShardedTensor shard(const std::string& key) {
  return ShardedTensor::from_rank_offsets(key, tensor(), {{0, 0, 2}});
}
ShardedObject object(const std::string& key, Value data) {
  return ShardedObject::make(key, std::move(data), {2}, {1});
}
StateNode dict(std::initializer_list<std::pair<PathElement, StateNode>> entries) {
  StateDict made;
  for (const auto& [key, node] : entries) made.entries().emplace_back(key, node);
  return made;
}

const Dialect& megatron() {
  static const auto dialect = megatron_dialect();
  return *dialect;
}
Items to_items(const StateDict& state) { return megatron().to_items(state, *torch_dist_format()); }

// What a load of `stored` returns for the template `wanted`, as one value.
Value text_of(const StateNode& node) {
  if (const auto* inner = node.get_if<StateDict>()) {
    Value::Dict entries;
    for (const auto& [key, child] : inner->entries()) {
      entries.emplace_back(std::visit([](const auto& k) { return Value(k); }, key), text_of(child));
    }
    return Value::dict(std::move(entries));
  }
  if (const auto* list = node.get_if<StateList>()) {
    Value::List items;
    for (const StateNode& child : *list) items.push_back(text_of(child));
    return Value::list(std::move(items));
  }
  if (const auto* sharded = node.get_if<ShardedTensor>()) return "tensor " + sharded->key;
  if (const auto* sharded = node.get_if<ShardedObject>()) return sharded->data;
  if (const auto* plain = node.get_if<TensorView>()) return Value(*plain);
  return *node.get_if<Value>();
}

Value loaded(const StateDict& wanted, const Items& stored) {
  Items asked = megatron().wanted_items(wanted, &*stored.common);
  asked.common = stored.common;
  for (ObjectItem& item : asked.objects) {
    for (const ObjectItem& other : stored.objects) {
      if (other.key == item.key) {
        item.value = megatron().object_of(other.value, *torch_dist_format());
      }
    }
  }
  return text_of(megatron().from_items(wanted, asked));
}

ErrorCode code_of(const std::function<void()>& body, const std::string& fact) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(fact), std::string::npos) << error.what();
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::kInternal;
}

StateDict model() {
  StateDict state;
  state["iteration"] = 7;
  state["model"] = dict({{"w", shard("layer.w")}, {"extra", object("extra", "rank 1")}});
  state["optimizer"] = dict(
      {{"step", 3}, {"state", dict({{int64_t{0}, shard("exp_avg")}})}, {"empty", StateDict()}});
  state["plain"] = tensor();
  return state;
}

TEST(MegatronDialect, WrappedEntitiesAreItemsAndTheRestIsCommon) {
  const Items items = to_items(model());
  ASSERT_EQ(items.tensors.size(), 2u);
  EXPECT_EQ(items.tensors[0].key, "layer.w");
  EXPECT_EQ(items.tensors[1].key, "exp_avg");
  const Value common =
      Value::dict({{"iteration", 7},
                   {"optimizer", Value::dict({{"step", 3}, {"empty", Value::dict({})}})},
                   {"plain", Value(tensor())}});
  EXPECT_EQ(items.common, common);
  ASSERT_EQ(items.objects.size(), 2u);
  EXPECT_EQ(items.objects[0].key, "extra/shard_1_2");
  EXPECT_EQ(items.objects[0].value, Value::list({"rank 1"}));
  EXPECT_FALSE(items.objects[0].common);
  EXPECT_EQ(items.objects[1].key, "common_state/shard_0_1");
  EXPECT_EQ(items.objects[1].value, Value::list({common}));
  EXPECT_TRUE(items.objects[1].common);
}

TEST(MegatronDialect, TheIndexIsCommonPtAndThenMetadataJson) {
  const Items items = to_items(model());
  const Index index = megatron().encode_index(items, *torch_dist_format());
  ASSERT_EQ(index.size(), 2u);
  EXPECT_EQ(index[0].name, "common.pt");
  EXPECT_EQ(index[0].role, IndexRole::kBefore);
  EXPECT_EQ(read_torch_archive(index[0].bytes), items.common);
  EXPECT_EQ(index[1].name, "metadata.json");
  EXPECT_EQ(index[1].role, IndexRole::kSwitch);
  EXPECT_EQ(as_text(index[1].bytes),
            R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
            R"("common_backend": "torch", "common_backend_version": 1})");
}

TEST(MegatronDialect, ALoadGivesTheCheckpointsCommonStateAndTheCallersStructure) {
  const Items stored = to_items(model());
  StateDict wanted;
  wanted["model"] = dict({{"extra", object("extra", nullptr)}, {"w", shard("layer.w")}});
  wanted["iteration"] = "of the caller";
  const Value tree = loaded(wanted, stored);
  EXPECT_EQ(to_string(tree),
            "{'model': {'extra': 'rank 1', 'w': 'tensor layer.w'}, 'iteration': 7, 'optimizer': "
            "{'step': 3, 'empty': {}}, 'plain': tensor float32 [2]}");
}

// [{sharded and common}, {common}], like an optimizer's param_groups; and lists in which only some
// elements are sharded.
TEST(MegatronDialect, ListsAreMergedAsTheyWereTakenApart) {
  StateDict state;
  state["groups"] = StateList{dict({{"lr", 1}, {"master", shard("m")}}), dict({{"lr", 2}})};
  state["mixed"] = StateList{StateNode("a"), StateNode(shard("s")), StateNode("b")};
  state["all"] = StateList{StateNode(shard("t"))};
  state["none"] = StateList{StateNode(1), StateNode(Value())};
  const Items stored = to_items(state);
  EXPECT_EQ(to_string(*stored.common),
            "{'groups': [{'lr': 1}, {'lr': 2}], 'mixed': ['a', 'b'], 'none': [1, None]}");
  EXPECT_EQ(to_string(loaded(state, stored)),
            "{'groups': [{'lr': 1, 'master': 'tensor m'}, {'lr': 2}], 'mixed': ['a', 'tensor s', "
            "'b'], 'all': ['tensor t'], 'none': [1, None]}");
  // The template has only the sharded elements. They are paired one by one with the common ones, as
  // in stock Megatron-Core.
  StateDict sharded_only;
  sharded_only["groups"] = StateList{dict({{"master", shard("m")}}), dict({{"other", shard("o")}})};
  EXPECT_EQ(to_string(*loaded(sharded_only, stored).find("groups")),
            "[{'master': 'tensor m', 'lr': 1}, {'other': 'tensor o', 'lr': 2}]");
  sharded_only["groups"] = StateList{dict({{"master", shard("m")}})};
  EXPECT_EQ(code_of([&] { loaded(sharded_only, stored); }, "groups"), ErrorCode::kMismatch);
}

TEST(MegatronDialect, AListOfTheCallersIsIgnoredWhereItsLengthDiffers) {
  StateDict state;
  state["steps"] = StateList{dict({{"a", 1}}), dict({{"b", 2}})};
  StateDict wanted;
  wanted["steps"] = StateList{dict({{"a", 1}})};
  EXPECT_EQ(to_string(loaded(wanted, to_items(state))), "{'steps': [{'a': 1}, {'b': 2}]}");
}

TEST(MegatronDialect, AnUnwrappedLeafThatTheCommonStateLacksIsAskedForByItsPath) {
  const Items stored = to_items({});
  StateDict wanted;
  wanted["model"] = dict({{"w", tensor()}, {"n", 1}});
  const Items asked = megatron().wanted_items(wanted, &*stored.common);
  ASSERT_EQ(asked.tensors.size(), 1u);
  EXPECT_EQ(asked.tensors[0].key, "model.w");
  ASSERT_EQ(asked.objects.size(), 1u);
  EXPECT_EQ(asked.objects[0].key, "model.n");
  EXPECT_EQ(to_string(loaded(wanted, stored)), "{'model': {'w': tensor float32 [2], 'n': 1}}");
}

TEST(MegatronDialect, AShardedEntityIsNoValueOfTheCommonState) {
  StateDict state;
  state["w"] = 1;
  StateDict wanted;
  wanted["w"] = shard("w");
  EXPECT_EQ(code_of([&] { loaded(wanted, to_items(state)); }, "w"), ErrorCode::kMismatch);
}

TEST(MegatronDialect, TheKeyOfTheCommonStateIsReserved) {
  StateDict state;
  state["a"] = ShardedObject::make("common_state", 1, {1}, {0});
  EXPECT_EQ(code_of([&] { to_items(state); }, "common_state"), ErrorCode::kInvalidArgument);
  state["a"] = shard("common_state/shard_0_1");
  EXPECT_EQ(code_of([&] { to_items(state); }, "common_state"), ErrorCode::kInvalidArgument);
}

TEST(MegatronDialect, AnObjectOfTorchDistIsTheFirstOfItsList) {
  EXPECT_EQ(megatron().object_of(Value::list({1, 2}), *torch_dist_format()), Value(1));
  for (const Value& other : {Value::list({}), Value(1), Value::tuple({1})}) {
    EXPECT_EQ(code_of([&] { megatron().object_of(other, *torch_dist_format()); }, "list"),
              ErrorCode::kCorrupt);
  }
}

TEST(MegatronDialect, PickledObjectsAreInTheCommonStateAsTheyAreRead) {
  // collections.OrderedDict by name, as Python pickles a class.
  const Bytes pickle = to_bytes("\x80\x02\x63ollections\nOrderedDict\n.");
  StateDict state;
  state["class"] = Value(Pickled{pickle, false});
  const Value* kept = to_items(state).common->find("class");
  ASSERT_NE(kept, nullptr);
}

TEST(MegatronDialect, DamagedFilesOfTheIndexAreNamed) {
  const Items items = to_items(model());
  DirectoryFiles files;
  for (const IndexFile& file : megatron().encode_index(items, *torch_dist_format())) {
    files.names.push_back(file.name);
    files.contents[file.name] = file.bytes;
  }
  EXPECT_TRUE(megatron().verify_index(files).empty());
  EXPECT_EQ(megatron().parse_common(files), items.common);
  Bytes& common = files.contents["common.pt"];
  common[common.size() / 3] ^= std::byte{1};
  files.contents["metadata.json"].pop_back();
  const auto faults = megatron().verify_index(files);
  ASSERT_EQ(faults.size(), 2u);
  EXPECT_EQ(faults[0].file, "metadata.json");
  EXPECT_EQ(faults[1].file, "common.pt");
}

}  // namespace tilestone::torch_dist::megatron_dialect_test
