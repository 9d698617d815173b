// A tree as the items that torch.distributed.checkpoint would make of it, and back. The rules are
// torch 2.13's flatten_state_dict:
//  - a dict is descended, its keys as text; an empty one leaves nothing;
//  - a list is descended when it holds, at any depth of lists, a tensor, a sharded entity or a
//    dict; else the whole list is one object;
//  - everything else (a tuple, whatever it holds) is a leaf, its key the dotted path.
// A sharded tensor or object has its own key instead. A path is recorded where it is the key.
#include <string>
#include <unordered_map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/value_check_internal.h"
#include "tilestone/format/dialect/dialect.h"

namespace tilestone {
namespace dialect {
namespace {

// ---- Which lists are descended ----

// True when the list has to be taken apart.
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

// A list that is not descended, as the one value that it is.
Value as_value(const StateList& list) {
  Value::List items;
  items.reserve(list.size());
  for (const StateNode& node : list) {
    const auto* inner = node.get_if<StateList>();
    items.push_back(inner != nullptr ? as_value(*inner) : *node.get_if<Value>());
  }
  return Value::list(std::move(items));
}

std::string key_text(const PathElement& key) {
  const auto* text = std::get_if<std::string>(&key);
  return text != nullptr ? *text : std::to_string(std::get<int64_t>(key));
}

// str(key) of Python.
std::string key_text(const Value& key) {
  return key.kind() == Value::Kind::kString ? key.as_string() : to_string(key);
}

[[noreturn]] void refuse_unbuilt(const Path& path, std::string_view what) {
  throw Error(ErrorCode::kInternal, "a " + std::string(what) + " in a tree that is made into items")
      .with_key(dotted(path));
}

// ---- Tree to items ----

class Flattener {
 public:
  Items run(const StateDict& state) {
    owners_.reserve(state.size());
    items_.tensors.reserve(state.size());
    visit(state);
    return std::move(items_);
  }

 private:
  enum class Owner { kPath, kShardedTensor, kShardedObject };

  void visit(const StateDict& dict) {
    for (const auto& [key, node] : dict.entries()) at(key_text(key), [&] { visit(node); });
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
  // A plain tensor: the same on every rank that has it.
  void visit(const TensorView& tensor) {
    TensorItem item;
    item.key = dotted(path_);
    item.path = path_;
    item.dtype = tensor.dtype;
    item.global_shape = tensor.shape;
    item.pieces.push_back({Box::whole(tensor.shape), tensor});
    add(std::move(item), Owner::kPath);
  }
  void visit(const ShardedTensor& tensor) {
    TensorItem item;
    item.key = tensor.key;
    if (tensor.key == dotted(path_)) item.path = path_;
    item.dtype = tensor.data.dtype;
    item.global_shape = tensor.global_shape;
    item.pieces = tensor.pieces;
    item.replica_id = tensor.replica_id;
    item.holders = tensor.holders;
    item.allow_shape_mismatch = tensor.allow_shape_mismatch;
    add(std::move(item), Owner::kShardedTensor);
  }
  void visit(const ShardedObject& object) {
    ObjectItem item;
    item.key = object.unique_key();
    if (item.key == dotted(path_)) item.path = path_;
    item.value = object.data;
    item.replica_id = object.replica_id;
    check(item);
    claim(item.key, Owner::kShardedObject);
    items_.objects.push_back(std::move(item));
  }
  void visit(const ShardedTensorFactory&) { refuse_unbuilt(path_, "factory"); }
  void visit(const LocalNonpersistent&) { refuse_unbuilt(path_, "non-persistent value"); }

  void add(TensorItem item, Owner owner) {
    claim(item.key, owner);
    items_.tensors.push_back(std::move(item));
  }
  void add_object(Value value) {
    ObjectItem item;
    item.key = dotted(path_);
    item.path = path_;
    item.value = std::move(value);
    item.common = true;
    check(item);
    claim(item.key, Owner::kPath);
    items_.objects.push_back(std::move(item));
  }

  // What could not be read back is refused here, before anything is written.
  static void check(const ObjectItem& item) {
    try {
      archive::check_value(item.value);
    } catch (Error& error) {
      error.with_key(item.key);
      throw;
    }
  }

  // Several sharded tensors of one tree may be shards of one key (layers stacked along a prepended
  // axis); any other key is given once.
  void claim(const std::string& key, Owner owner) {
    const auto [known, fresh] = owners_.emplace(key, owner);
    if (fresh || (owner == Owner::kShardedTensor && known->second == owner)) return;
    throw Error(ErrorCode::kInvalidArgument,
                "two leaves of the state dict have one key; the "
                "second is at " +
                    dotted(path_))
        .with_key(key);
  }

  template <typename Element, typename Body>
  void at(Element&& element, const Body& body) {
    path_.emplace_back(std::forward<Element>(element));
    body();
    path_.pop_back();
  }

  Path path_;
  Items items_;
  std::unordered_map<std::string, Owner> owners_;
};

// ---- Items to tree ----

// Walks the original as Flattener does, so the n-th leaf met is the n-th item.
class Unflattener {
 public:
  explicit Unflattener(const Items& loaded) : loaded_(loaded) {}

  StateDict run(const StateDict& original) {
    StateDict tree = rebuild(original);
    if (tensors_ != loaded_.tensors.size() || objects_ != loaded_.objects.size()) disagree("");
    return tree;
  }

 private:
  StateDict rebuild(const StateDict& dict) {
    StateDict tree;
    auto& entries = tree.entries();
    entries.reserve(dict.size());
    for (const auto& [key, node] : dict.entries()) {
      at(key_text(key), [&] { entries.emplace_back(key, rebuild_node(node)); });
    }
    return tree;
  }
  StateNode rebuild_node(const StateNode& node) {
    return std::visit([&](const auto& content) { return StateNode(rebuild(content)); },
                      node.variant());
  }
  StateNode rebuild(const StateList& list) {
    StateList tree;
    if (!is_descended(list)) {
      const Value value = next_object(dotted(path_));
      if (value.kind() != Value::Kind::kList) return value;
      for (const Value& item : value.items()) tree.emplace_back(item);
      return tree;
    }
    for (size_t i = 0; i < list.size(); ++i) {
      at(static_cast<int64_t>(i), [&] { tree.push_back(rebuild_node(list[i])); });
    }
    return tree;
  }
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
    return next_object(dotted(path_));
  }
  TensorView rebuild(const TensorView& tensor) {
    const TensorItem& item = next_tensor(dotted(path_));
    if (item.pieces.size() != 1 || !(item.pieces[0].data.shape == tensor.shape)) disagree(item.key);
    return item.pieces[0].data;
  }
  ShardedTensor rebuild(const ShardedTensor& tensor) {
    const TensorItem& item = next_tensor(tensor.key);
    if (item.pieces.size() != tensor.pieces.size()) disagree(item.key);
    ShardedTensor loaded = tensor;
    loaded.pieces = item.pieces;
    if (!tensor.data.has_data()) loaded.data = local_tensor(tensor.data, item.pieces);
    return loaded;
  }
  ShardedObject rebuild(const ShardedObject& object) {
    ShardedObject loaded = object;
    loaded.data = next_object(object.unique_key());
    return loaded;
  }
  StateNode rebuild(const ShardedTensorFactory&) { refuse_unbuilt(path_, "factory"); }
  StateNode rebuild(const LocalNonpersistent&) { refuse_unbuilt(path_, "non-persistent value"); }

  // The local tensor where its template had no memory: the one piece, without prepended axes. A
  // tensor of several pieces stays without; its pieces hold what was loaded.
  static TensorView local_tensor(const TensorView& wanted, const std::vector<Piece>& pieces) {
    if (pieces.size() != 1) return wanted;
    TensorView data = pieces[0].data;
    if (data.shape == wanted.shape || numel(data.shape) != numel(wanted.shape)) return data;
    data.shape = wanted.shape;
    data.strides = contiguous_strides(wanted.shape);
    return data;
  }

  const TensorItem& next_tensor(const std::string& key) {
    if (tensors_ >= loaded_.tensors.size()) disagree(key);
    const TensorItem& item = loaded_.tensors[tensors_++];
    if (item.key != key) disagree(key);
    return item;
  }
  const Value& next_object(const std::string& key) {
    if (objects_ >= loaded_.objects.size()) disagree(key);
    const ObjectItem& item = loaded_.objects[objects_++];
    if (item.key != key) disagree(key);
    return item.value;
  }
  [[noreturn]] static void disagree(const std::string& key) {
    throw Error(ErrorCode::kInternal, "loaded items are not those of the state dict").with_key(key);
  }

  template <typename Element, typename Body>
  void at(Element&& element, const Body& body) {
    path_.emplace_back(std::forward<Element>(element));
    body();
    path_.pop_back();
  }

  const Items& loaded_;
  size_t tensors_ = 0;
  size_t objects_ = 0;
  Path path_;
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
  Items wanted_items(const StateDict& wanted, const Metadata&) const override {
    return Flattener().run(wanted);
  }
  StateDict from_items(const StateDict& wanted, const Items& loaded) const override {
    return Unflattener(loaded).run(wanted);
  }
};

}  // namespace
}  // namespace dialect

std::shared_ptr<const Dialect> pytorch_dialect() {
  return std::make_shared<dialect::PyTorchDialect>();
}

}  // namespace tilestone
