// Merges a template and the checkpoint's common state into one tree, as Megatron-Core's merge does:
// dicts by their keys, lists element by element. There are two ways to pair the elements of lists:
//  - If the template has all elements: each element that has a common part is paired with the next
//    element in the common state, because the writer took the list apart in this way.
//  - If the template has only the elements with sharded entities: these are paired one by one with
//    the elements in the common state.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/dialect/leaves_internal.h"
#include "tilestone/format/dialect/megatron_internal.h"

namespace tilestone::dialect {
namespace {

bool has_sharded(const StateNode& node) {
  if (const auto* dict = node.get_if<StateDict>()) {
    return std::any_of(dict->begin(), dict->end(),
                       [](const auto& entry) { return has_sharded(entry.second); });
  }
  if (const auto* list = node.get_if<StateList>()) {
    return std::any_of(list->begin(), list->end(), has_sharded);
  }
  return node.get_if<ShardedTensor>() != nullptr || node.get_if<ShardedObject>() != nullptr;
}

// Whether a writer with this node has a part of it in the common state.
bool has_common(const StateNode& node) {
  if (const auto* dict = node.get_if<StateDict>()) {
    return dict->empty() || std::any_of(dict->begin(), dict->end(),
                                        [](const auto& entry) { return has_common(entry.second); });
  }
  if (const auto* list = node.get_if<StateList>()) {
    return list->empty() || std::any_of(list->begin(), list->end(), has_common);
  }
  return node.get_if<Value>() != nullptr || node.get_if<TensorView>() != nullptr;
}

bool is_path_element(const Value& key) {
  return key.kind() == Value::Kind::kString || key.kind() == Value::Kind::kInt;
}

// The key of a pickled dict as a key of a template: strings and ints unchanged, others as text.
PathElement path_element(const Value& key) {
  if (key.kind() == Value::Kind::kInt) return key.as_int();
  return key_text(key);
}

// Walks over the template and merges the common state into it. The subclasses collect the items of
// the sharded leaves, or fill in the loaded content.
class CommonMerger {
 public:
  virtual ~CommonMerger() = default;

  StateDict run(const StateDict& wanted, const Value& common) {
    StateNode tree = merge(wanted, &common);
    auto* dict = tree.get_if<StateDict>();
    if (dict == nullptr) refuse_common("a dict");
    return std::move(*dict);
  }

 protected:
  virtual StateNode sharded(const ShardedTensor& tensor) = 0;
  virtual StateNode sharded(const ShardedObject& object) = 0;
  // For an unwrapped leaf that is not in the common state.
  virtual StateNode lacking(const TensorView& tensor, const Path& path) = 0;
  virtual StateNode lacking(const Value& value, const Path& path) = 0;

 private:
  StateNode merge(const StateNode& node, const Value* common) {
    return std::visit([&](const auto& content) { return merge(content, common); }, node.variant());
  }
  StateNode merge(const Value& value, const Value* common) {
    if (common != nullptr) return *common;
    if (value.kind() == Value::Kind::kTensor) return lacking(value.as_tensor(), path_);
    return lacking(value, path_);
  }
  StateNode merge(const TensorView& tensor, const Value* common) {
    return common != nullptr ? *common : lacking(tensor, path_);
  }
  StateNode merge(const ShardedTensor& tensor, const Value* common) {
    if (common != nullptr) refuse_common("the sharded tensor " + tensor.key);
    return sharded(tensor);
  }
  StateNode merge(const ShardedObject& object, const Value* common) {
    if (common != nullptr) refuse_common("the sharded object " + object.unique_key());
    return sharded(object);
  }
  StateNode merge(const ShardedTensorFactory&, const Value*) { refuse_unbuilt(path_, "factory"); }
  StateNode merge(const LocalNonpersistent&, const Value*) {
    refuse_unbuilt(path_, "non-persistent value");
  }

  StateNode merge(const StateDict& dict, const Value* common) {
    if (common != nullptr && common->kind() != Value::Kind::kDict) {
      if (has_sharded(dict)) refuse_common("a dict with sharded entities");
      return *common;
    }
    std::unordered_map<PathElement, const Value*> stored;
    if (common != nullptr) stored = by_element(common->as_dict());
    std::unordered_set<const Value*> taken;
    StateDict tree;
    auto& entries = tree.entries();
    for (const auto& [key, node] : dict.entries()) {
      const auto found = stored.find(key);
      const Value* part = found == stored.end() ? nullptr : found->second;
      path_.push_back(key);
      entries.emplace_back(key, merge(node, part));
      path_.pop_back();
      taken.insert(part);
    }
    if (common != nullptr) add_rest(common->as_dict(), taken, tree);
    return tree;
  }

  // If two keys have the same text, the string or int is found.
  static std::unordered_map<PathElement, const Value*> by_element(const Value::Dict& dict) {
    std::unordered_map<PathElement, const Value*> found;
    for (const bool plain : {true, false}) {
      for (const auto& [key, value] : dict) {
        if (is_path_element(key) == plain) found.emplace(path_element(key), &value);
      }
    }
    return found;
  }

  // Adds what only the common state has, in its order and under its keys.
  static void add_rest(const Value::Dict& common, const std::unordered_set<const Value*>& taken,
                       StateDict& tree) {
    auto& entries = tree.entries();
    for (const auto& [key, value] : common) {
      if (taken.contains(&value)) continue;
      if (is_path_element(key)) {
        entries.emplace_back(path_element(key), value);
      } else {
        tree.others().emplace_back(key, value);
      }
    }
  }

  StateNode merge(const StateList& list, const Value* common) {
    if (common == nullptr) return merge_elements(list, [](size_t) { return true; }, nullptr);
    const bool is_list = common->kind() == Value::Kind::kList;
    const size_t size = is_list ? common->items().size() : 0;
    if (!has_sharded(list)) {
      if (!is_list || size != list.size()) return *common;
      return merge_elements(list, [](size_t) { return true; }, common);
    }
    if (!is_list) refuse_common("a list with sharded entities");
    const auto common_part = [&](size_t i) { return has_common(list[i]); };
    const auto sharded_part = [&](size_t i) { return has_sharded(list[i]); };
    if (count(list, common_part) == size) return merge_elements(list, common_part, common);
    if (count(list, sharded_part) == size) {
      StateList only;
      for (const StateNode& node : list) {
        if (has_sharded(node)) only.push_back(node);
      }
      return merge_elements(only, [](size_t) { return true; }, common);
    }
    refuse_common("a list with sharded entities and " + std::to_string(list.size()) + " elements",
                  "a list of " + std::to_string(size) + " elements");
  }

  // Merges each element for which `takes` is true with the next element of the common state.
  template <typename Takes>
  StateNode merge_elements(const StateList& list, const Takes& takes, const Value* common) {
    StateList tree;
    size_t next = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const bool has_one = common != nullptr && takes(i);
      path_.emplace_back(static_cast<int64_t>(i));
      tree.push_back(merge(list[i], has_one ? &common->items()[next++] : nullptr));
      path_.pop_back();
    }
    return tree;
  }

  template <typename Counted>
  static size_t count(const StateList& list, const Counted& counted) {
    size_t found = 0;
    for (size_t i = 0; i < list.size(); ++i) found += counted(i) ? 1 : 0;
    return found;
  }

  [[noreturn]] void refuse_common(const std::string& wanted,
                                  const std::string& found = "another value") const {
    throw Error(ErrorCode::kMismatch, "the state dict has " + wanted +
                                          " where the checkpoint's common state has " + found)
        .with_key(dotted(path_));
  }

  Path path_;
};

// Collects the items of the sharded leaves, in the order of the walk.
class TemplateMerger final : public CommonMerger {
 public:
  Items take() { return std::move(items_); }

 protected:
  StateNode sharded(const ShardedTensor& tensor) override {
    claims_.claim(tensor.key, KeyClaims::Owner::kShardedTensor, {});
    items_.tensors.push_back(item_of(tensor));
    return tensor;
  }
  StateNode sharded(const ShardedObject& object) override {
    items_.objects.push_back(item_of(object));
    return object;
  }
  StateNode lacking(const TensorView& tensor, const Path& path) override {
    TensorItem item = item_of(tensor, dotted(path));
    claims_.claim(item.key, KeyClaims::Owner::kPath, path);
    item.path = path;
    items_.tensors.push_back(std::move(item));
    return tensor;
  }
  StateNode lacking(const Value& value, const Path& path) override {
    ObjectItem item;
    item.key = dotted(path);
    item.path = path;
    item.value = value;
    item.common = true;
    items_.objects.push_back(std::move(item));
    return value;
  }

 private:
  Items items_;
  KeyClaims claims_;
};

// Fills in the loaded items, in the order in which TemplateMerger collected them.
class Filler final : public CommonMerger {
 public:
  explicit Filler(const Items& loaded) : loaded_(loaded) {}
  void expect_end() const { loaded_.expect_end(); }

 protected:
  StateNode sharded(const ShardedTensor& tensor) override {
    return filled(tensor, loaded_.next_tensor(tensor.key));
  }
  StateNode sharded(const ShardedObject& object) override {
    ShardedObject loaded = object;
    loaded.data = loaded_.next_object(object.unique_key());
    return loaded;
  }
  StateNode lacking(const TensorView&, const Path& path) override {
    const TensorItem& item = loaded_.next_tensor(dotted(path));
    if (item.pieces.size() != 1) disagree(item.key);
    return item.pieces[0].data;
  }
  StateNode lacking(const Value&, const Path& path) override {
    return loaded_.next_object(dotted(path));
  }

 private:
  LoadedItems loaded_;
};

}  // namespace

Items wanted_of(const StateDict& wanted, const Value& common) {
  TemplateMerger merger;
  merger.run(wanted, common);
  return merger.take();
}

StateDict merged(const StateDict& wanted, const Items& loaded) {
  if (!loaded.common) throw Error(ErrorCode::kInternal, "the loaded items have no common state");
  Filler filler(loaded);
  StateDict tree = filler.run(wanted, *loaded.common);
  filler.expect_end();
  return tree;
}

}  // namespace tilestone::dialect
