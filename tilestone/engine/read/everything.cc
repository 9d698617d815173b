#include "tilestone/engine/read/everything_internal.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/read/items_internal.h"

namespace tilestone::engine {
namespace {

[[noreturn]] void fail_taken(const std::string& key) {
  throw Error(ErrorCode::kUnsupported,
              "two items of the checkpoint have one place in its tree, so it can't be loaded "
              "without a template")
      .with_key(key)
      .with_hint("load with a template, or read single keys (Checkpoint::read)");
}

// A rank without layers has an empty list where others have a list of layers.
bool is_empty_list(const StateNode& node) {
  const auto* value = node.get_if<Value>();
  return value != nullptr && value->kind() == Value::Kind::kList && value->items().empty();
}

class TreeBuilder {
 public:
  explicit TreeBuilder(const TreeKeys& keys) : keys_(keys) {}

  void add(const std::string& key, Path path, StateNode node, uint32_t order) {
    if (path.empty()) path.emplace_back(key);
    if (path.size() > kMaxStateDepth) {
      throw Error(ErrorCode::kUnsafe, "the path of an item has " + std::to_string(path.size()) +
                                          " elements; expected at most " +
                                          std::to_string(kMaxStateDepth))
          .with_key(key);
    }
    places_.push_back({key, std::move(path), std::move(node), order});
  }

  StateDict build() {
    sort();
    add_empty_dicts();
    StateDict tree = dict(0, places_.size(), 0);
    restore(tree, {});
    return tree;
  }

 private:
  struct StoredPath {
    std::string key;
    Path path;
    StateNode node;
    uint32_t order = 0;
  };
  // places_[begin, end), which have one element in common.
  struct Child {
    const PathElement* element;
    size_t begin;
    size_t end;
    uint32_t order;  // of the first leaf
  };

  void sort() {
    std::stable_sort(places_.begin(), places_.end(),
                     [](const StoredPath& a, const StoredPath& b) { return a.path < b.path; });
  }

  void add_empty_dicts() {
    std::vector<const Path*> items;
    items.reserve(places_.size());
    for (const StoredPath& place : places_) items.push_back(&place.path);
    const std::vector<Path> empty = empty_dicts(keys_, std::move(items));
    for (const Path& path : empty) {
      places_.push_back({dotted(path), path, StateDict(), keys_.at(path).order});
    }
    if (!empty.empty()) sort();
  }

  // The container of places_[begin, end), in the order of the leaves. The first `depth` elements of
  // their paths are equal.
  StateDict dict(size_t begin, size_t end, size_t depth) {
    std::vector<Child> children;
    bool has_index = false;  // of a list
    while (begin < end) {
      const PathElement* const element = &places_[begin].path[depth];
      Child child{element, begin, begin, places_[begin].order};
      for (; child.end < end && places_[child.end].path[depth] == *element; ++child.end) {
        child.order = std::min(child.order, places_[child.end].order);
      }
      has_index = has_index || std::holds_alternative<int64_t>(*element);
      children.push_back(child);
      begin = child.end;
    }
    if (!has_index) {
      std::stable_sort(children.begin(), children.end(),
                       [](const Child& a, const Child& b) { return a.order < b.order; });
    }
    StateDict out;
    auto& entries = out.entries();
    for (const Child& child : children) {
      entries.emplace_back(*child.element, node(child.begin, child.end, depth + 1));
    }
    return out;
  }

  bool is_in_list(size_t at, size_t depth) const {
    const Path& path = places_[at].path;
    return path.size() > depth && std::holds_alternative<int64_t>(path[depth]);
  }

  StateNode node(size_t begin, size_t end, size_t depth) {
    if (places_[begin].path.size() == depth) {
      if (end - begin > 1 && is_empty_list(places_[begin].node) && is_in_list(begin + 1, depth)) {
        return node(begin + 1, end, depth);
      }
      if (end - begin > 1) fail_taken(places_[begin + 1].key);
      return std::move(places_[begin].node);
    }
    StateNode made = as_list(dict(begin, end, depth));
    if (auto* child = made.get_if<StateDict>()) {
      const Path& path = places_[begin].path;
      restore(*child, Path(path.begin(), path.begin() + static_cast<ptrdiff_t>(depth)));
    }
    return made;
  }

  void restore(StateDict& dict, const Path& path) const {
    if (const auto known = keys_.find(path); known != keys_.end()) {
      restore_keys(dict, known->second);
    } else if (keys_of(dict)) {
      log_once(
          LogLevel::kInfo,
          "the checkpoint does not record which keys of dicts were ints, as is usual for those "
          "of stock PyTorch: all keys that are loaded without a template are strings, for "
          "example those of " +
              (path.empty() ? std::string("the state itself") : dotted(path)));
    }
  }

  // Ints are list indices, because torch writes the keys of dicts as text.
  static StateNode as_list(StateDict dict) {
    int64_t index = 0;
    for (const auto& [element, child] : std::as_const(dict).entries()) {
      const auto* number = std::get_if<int64_t>(&element);
      if (number == nullptr || *number != index++) return dict;
    }
    StateList list;
    for (auto& [element, child] : dict.entries()) list.push_back(std::move(child));
    return list;
  }

  const TreeKeys& keys_;
  std::vector<StoredPath> places_;
};

// Recursion is bounded: kMaxStateDepth limits the tree, and the parser limits the values' depth.
void merge(StateDict& tree, const Value& common, const std::string& at) {
  for (const auto& [key, value] : common.as_dict()) {
    const bool is_int = key.kind() == Value::Kind::kInt;
    if (!is_int && key.kind() != Value::Kind::kString) {
      tree.others().emplace_back(key, value);
      continue;
    }
    const PathElement element = is_int ? PathElement(key.as_int()) : PathElement(key.as_string());
    const std::string name = at.empty() ? dotted({element}) : at + "." + dotted({element});
    StateNode* found = tree.find(element);
    if (found == nullptr) {
      tree[element] = value;
    } else if (found->get_if<StateDict>() != nullptr && value.kind() == Value::Kind::kDict) {
      merge(*found->get_if<StateDict>(), value, name);
    } else {
      fail_taken(name);
    }
  }
}

}  // namespace

Items all_items(const Metadata& stored) {
  Items items;
  items.dict_keys = stored.dict_keys;
  items.tensors.reserve(stored.tensors.size());
  for (const StoredTensor& tensor : stored.tensors) {
    TensorItem item;
    item.key = tensor.key;
    item.path = tensor.path;
    item.dtype = tensor.dtype;
    item.global_shape = tensor.shape;
    item.order = tensor.order;
    item.pieces.push_back(
        {Box::whole(tensor.shape), TensorView::without_data(tensor.dtype, tensor.shape)});
    items.tensors.push_back(std::move(item));
  }
  for (const StoredObject& object : stored.objects) {
    ObjectItem item;
    item.key = object.key;
    item.path = object.path;
    item.order = object.order;
    items.objects.push_back(std::move(item));
  }
  return items;
}

void give_memory(Items& items, const ReadContext& context) {
  for (const TensorItem& item : items.tensors) {
    const StoredTensor& stored = *context.metadata.find_tensor(item.key);
    std::vector<uint32_t> chunks(stored.chunks.size());
    std::iota(chunks.begin(), chunks.end(), 0u);
    const uint64_t bytes = checked_mul(static_cast<uint64_t>(numel(stored.shape)),
                                       itemsize(stored.dtype), "bytes of a tensor");
    expect_stored(context, bytes, stored, chunks);
  }
  for (TensorItem& item : items.tensors) {
    item.pieces[0].data = TensorView::allocate(item.dtype, item.global_shape);
  }
}

StateDict tree_of(Items items) {
  TreeBuilder builder(items.dict_keys);
  for (TensorItem& item : items.tensors) {
    builder.add(item.key, std::move(item.path), std::move(item.pieces[0].data), item.order);
  }
  for (ObjectItem& item : items.objects) {
    builder.add(item.key, std::move(item.path), std::move(item.value), item.order);
  }
  StateDict tree = builder.build();
  const bool merges = items.common && items.common->kind() == Value::Kind::kDict;
  if (merges) merge(tree, *items.common, "");
  return tree;
}

}  // namespace tilestone::engine
