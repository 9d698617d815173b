// Turns a tree into the items that torch.distributed.checkpoint would make of it, and back. The
// rules are those of torch 2.13's flatten_state_dict:
//  - A dict is descended; its keys become text. An empty dict leaves no item; Items::dict_keys
//    records it.
//  - A list is descended if it holds, at any depth of lists, a tensor, a sharded entity or a dict.
//    Otherwise the whole list is one object.
//  - Everything else is a leaf whose key is the dotted path. A tuple is a leaf whatever it holds.
// A sharded tensor or object has its own key instead. The path is recorded if it equals the key.
#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/dialect/leaves_internal.h"

namespace tilestone {
namespace dialect {
namespace {

// ---- Which lists are descended ----

bool is_descended(const Value::List& list) {
  for (const Value& item : list) {
    const Value::Kind kind = item.kind();
    if (kind == Value::Kind::kDict || kind == Value::Kind::kTensor) return true;
    if (kind == Value::Kind::kList && is_descended(item.items())) return true;
  }
  return false;
}

bool is_descended(const StateList& list) {
  for (const StateNode& node : list) {
    if (const auto* value = node.get_if<Value>()) {
      if (is_descended(Value::List{*value})) return true;
    } else if (const auto* inner = node.get_if<StateList>()) {
      if (is_descended(*inner)) return true;
    } else {
      return true;  // a dict, a tensor or a wrapped entity
    }
  }
  return false;
}

// A list that is not descended, as one value.
Value as_value(const StateList& list) {
  Value::List items;
  items.reserve(list.size());
  for (const StateNode& node : list) {
    const auto* inner = node.get_if<StateList>();
    items.push_back(inner != nullptr ? as_value(*inner) : *node.get_if<Value>());
  }
  return Value::list(std::move(items));
}

// Whether a manifest can record a key.
bool is_plain(const Value& key) {
  switch (key.kind()) {
    case Value::Kind::kNull:
    case Value::Kind::kBool:
    case Value::Kind::kInt:
    case Value::Kind::kFloat:
    case Value::Kind::kString:
    case Value::Kind::kBytes:
      return true;
    case Value::Kind::kTuple:
      return std::all_of(key.items().begin(), key.items().end(), is_plain);
    default:
      return false;
  }
}

// A dict inside a value, with its keys only.
StateDict as_state(const Value& dict) {
  StateDict keys;
  for (const auto& [key, item] : dict.as_dict()) {
    const bool is_int = key.kind() == Value::Kind::kInt;
    const std::string text = key_text(key);
    keys.entries().emplace_back(is_int ? PathElement(key.as_int()) : PathElement(text),
                                StateNode());
    if (!is_int && key.kind() != Value::Kind::kString && is_plain(key)) {
      keys.original_keys().emplace(text, key);
    }
  }
  return keys;
}

// ---- Tree to items ----

// A walk through a state, in which the path leads to the current element.
class Walk {
 protected:
  template <typename Element, typename Body>
  void at(Element&& element, const Body& body) {
    path_.emplace_back(std::forward<Element>(element));
    body();
    path_.pop_back();
  }

  Path path_;
};

class Flattener : Walk {
 public:
  Items run(const StateDict& state) {
    claims_.reserve(state.size());
    items_.tensors.reserve(state.size());
    visit(state);
    return std::move(items_);
  }

 private:
  void visit(const StateDict& dict) {
    note_keys(dict);
    for (const auto& [key, node] : dict.entries()) at(key_text(key), [&] { visit(node); });
    for (const auto& [key, value] : dict.others()) at(key_text(key), [&] { visit(value); });
  }
  void visit(const StateNode& node) {
    std::visit([&](const auto& content) { visit(content); }, node.variant());
  }
  void visit(const StateList& list) {
    if (!is_descended(list)) return add_object(as_value(list));
    for (size_t i = 0; i < list.size(); ++i) {
      at(static_cast<int64_t>(i), [&] { visit(list[i]); });
    }
  }
  void visit(const Value& value) {
    if (value.kind() == Value::Kind::kDict) {
      note_keys(as_state(value));
      for (const auto& [key, item] : value.as_dict()) at(key_text(key), [&] { visit(item); });
    } else if (value.kind() == Value::Kind::kList && is_descended(value.items())) {
      const Value::List& items = value.items();
      for (size_t i = 0; i < items.size(); ++i) {
        at(static_cast<int64_t>(i), [&] { visit(items[i]); });
      }
    } else if (value.kind() == Value::Kind::kTensor) {
      visit(value.as_tensor());
    } else {
      add_object(value);
    }
  }
  void visit(const TensorView& tensor) {
    TensorItem item = item_of(tensor, dotted(path_));
    item.path = path_;
    add(std::move(item), KeyClaims::Owner::kPath);
  }
  void visit(const ShardedTensor& tensor) {
    TensorItem item = item_of(tensor);
    if (tensor.key == dotted(path_)) item.path = path_;
    add(std::move(item), KeyClaims::Owner::kShardedTensor);
  }
  void visit(const ShardedObject& object) {
    ObjectItem item = item_of(object);
    if (item.key == dotted(path_)) item.path = path_;
    check_value(item.value, item.key);
    claims_.claim(item.key, KeyClaims::Owner::kShardedObject, path_);
    item.order = leaves_++;
    items_.objects.push_back(std::move(item));
  }
  void visit(const ShardedTensorFactory&) { refuse_unbuilt(path_, "factory"); }
  void visit(const LocalNonpersistent&) { refuse_unbuilt(path_, "non-persistent value"); }

  void note_keys(const StateDict& dict) {
    if (dict.empty() && dict.others().empty()) {
      if (path_.empty()) return;
      DictKeys& keys = items_.dict_keys[path_];
      keys.empty = true;
      keys.order = leaves_++;
      return;
    }
    std::optional<DictKeys> keys = keys_of(dict);
    for (const auto& [key, value] : dict.others()) {
      if (!is_plain(key)) continue;
      if (!keys) keys.emplace();
      keys->others.emplace(key_text(key), key);
    }
    if (!keys) return;
    check_distinct(dict);
    items_.dict_keys.emplace(path_, *std::move(keys));
  }
  // 1 and "1" may not be keys of one dict.
  void check_distinct(const StateDict& dict) const {
    std::unordered_set<std::string> texts;
    for (const auto& [key, node] : dict.entries()) {
      if (texts.insert(key_text(key)).second) continue;
      Path twice = path_;
      twice.push_back(key);
      throw Error(ErrorCode::kInvalidArgument,
                  "two keys of one dict are the same when they are converted to strings")
          .with_key(dotted(twice));
    }
  }

  void add(TensorItem item, KeyClaims::Owner owner) {
    claims_.claim(item.key, owner, path_);
    item.order = leaves_++;
    items_.tensors.push_back(std::move(item));
  }
  void add_object(Value value) {
    ObjectItem item;
    item.key = dotted(path_);
    item.path = path_;
    item.value = std::move(value);
    item.common = true;
    check_value(item.value, item.key);
    claims_.claim(item.key, KeyClaims::Owner::kPath, path_);
    item.order = leaves_++;
    items_.objects.push_back(std::move(item));
  }

  Items items_;
  KeyClaims claims_;
  uint32_t leaves_ = 0;  // so far
};

// ---- Items to tree ----

// Walks the original in the same order as Flattener, so the n-th leaf is the n-th item.
class Unflattener : Walk {
 public:
  explicit Unflattener(const Items& loaded) : loaded_(loaded) {}

  StateDict run(StateDict tree) {
    fill(tree);
    loaded_.expect_end();
    return tree;
  }

 private:
  // Replaces the template's content by what was loaded.
  void fill(StateDict& dict) {
    for (auto& [key, node] : dict.entries()) at(key_text(key), [&] { fill(node); });
    for (auto& [key, value] : dict.others()) at(key_text(key), [&] { fill(value); });
  }
  void fill(StateNode& node) {
    if (auto* list = node.get_if<StateList>(); list != nullptr && !is_descended(*list)) {
      node = loaded_list(loaded_.next_object(dotted(path_)));
    } else {
      std::visit([&](auto& content) { fill(content); }, node.variant());
    }
  }
  void fill(StateList& list) {
    for (size_t i = 0; i < list.size(); ++i) {
      at(static_cast<int64_t>(i), [&] { fill(list[i]); });
    }
  }
  static StateNode loaded_list(const Value& value) {
    if (value.kind() != Value::Kind::kList) return value;
    return StateList(value.items().begin(), value.items().end());
  }
  void fill(Value& value) { value = rebuild(value); }
  Value rebuild(const Value& value) {
    if (value.kind() == Value::Kind::kDict) {
      Value::Dict items;
      for (const auto& [key, item] : value.as_dict()) {
        at(key_text(key), [&] { items.emplace_back(key, rebuild(item)); });
      }
      return Value::dict(std::move(items));
    }
    if (value.kind() == Value::Kind::kList && is_descended(value.items())) {
      Value::List items;
      for (size_t i = 0; i < value.items().size(); ++i) {
        at(static_cast<int64_t>(i), [&] { items.push_back(rebuild(value.items()[i])); });
      }
      return Value::list(std::move(items));
    }
    if (value.kind() == Value::Kind::kTensor) return rebuild(value.as_tensor());
    return loaded_.next_object(dotted(path_));
  }
  TensorView rebuild(const TensorView& tensor) {
    const TensorItem& item = loaded_.next_tensor(dotted(path_));
    if (item.pieces.size() != 1 || !(item.pieces[0].data.shape == tensor.shape)) disagree(item.key);
    return item.pieces[0].data;
  }
  void fill(TensorView& tensor) { tensor = rebuild(tensor); }
  void fill(ShardedTensor& tensor) {
    const TensorItem& item = loaded_.next_tensor(tensor.key);
    tensor = filled(std::move(tensor), item);
  }
  void fill(ShardedObject& object) { object.data = loaded_.next_object(object.unique_key()); }
  void fill(ShardedTensorFactory&) { refuse_unbuilt(path_, "factory"); }
  void fill(LocalNonpersistent&) { refuse_unbuilt(path_, "non-persistent value"); }

  LoadedItems loaded_;
};

class PyTorchDialect final : public Dialect {
 public:
  std::string_view name() const override { return "pytorch"; }
  Items to_items(const StateDict& state, const Format&) const override {
    return Flattener().run(state);
  }
  Index encode_index(const Items&, const Format&) const override { return {}; }
  std::vector<std::string> index_files(std::span<const std::string>) const override { return {}; }
  std::optional<Value> parse_common(const DirectoryFiles&) const override { return std::nullopt; }
  Items wanted_items(const StateDict& wanted, const Value*) const override {
    return Flattener().run(wanted);
  }
  StateDict from_items(StateDict wanted, const Items& loaded) const override {
    return Unflattener(loaded).run(std::move(wanted));
  }
};

}  // namespace
}  // namespace dialect

std::shared_ptr<const Dialect> pytorch_dialect() {
  return std::make_shared<dialect::PyTorchDialect>();
}

}  // namespace tilestone
