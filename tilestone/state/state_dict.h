// StateDict: the nested tree that a caller saves and that a load returns.
#pragma once

#include <concepts>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/state/sharded.h"
#include "tilestone/state/value.h"

namespace tilestone {

class StateNode;

// What the caller of a save says about a tensor: values of plain kinds by name. See
// attribute_bytes() in plan/receipt.h.
using Attributes = std::map<std::string, Value>;

// A key of a dict: text or an int (Megatron's state dicts use both).
using PathElement = std::variant<std::string, int64_t>;
// The element as a part of a dotted path: text unchanged, an int in decimal.
std::string key_text(const PathElement& key);
// The path from the root to a leaf. A list index is also an int.
using Path = std::vector<PathElement>;
// The path's elements joined by dots, as in torch's flattening: "optimizer.state.0.exp_avg".
std::string dotted(const Path& path);

// An ordered dict of nodes. Look-ups take constant time once a non-const look-up has built the
// index. Several threads may call const members at the same time.
class StateDict {
 public:
  // Defined in state_dict.cc, as Value's and StateNode's are, because they take long to compile.
  StateDict() noexcept;
  StateDict(const StateDict&);
  StateDict(StateDict&&) noexcept;
  StateDict& operator=(const StateDict&);
  StateDict& operator=(StateDict&&) noexcept;
  ~StateDict();

  // Inserts a null value if the key is new.
  StateNode& operator[](const PathElement& key);
  template <std::convertible_to<std::string_view> Text>
  StateNode& operator[](const Text& key) {
    return (*this)[PathElement(std::string(std::string_view(key)))];
  }
  // Inserts nothing. Throws Error(kNotFound), naming the key, with similar keys in the hint.
  StateNode& at(const PathElement& key);
  const StateNode& at(const PathElement& key) const;
  StateNode* find(const PathElement& key);  // null if absent
  const StateNode* find(const PathElement& key) const;
  // The content at the key, as StateNode::as<T>() returns it: get<int>("step"),
  // get<TensorView>("weight"), get<StateDict>("model"). Throws Error(kNotFound) like at(), and
  // Error(kInvalidArgument) naming the key, the wanted type and the actual type.
  template <typename T>
  decltype(auto) get(const PathElement& key);
  template <typename T>
  decltype(auto) get(const PathElement& key) const;
  size_t size() const;
  bool empty() const { return size() == 0; }
  using Entry = std::pair<PathElement, StateNode>;
  // Entries may be added, removed and renamed through this reference until another member is
  // called. Through begin() and end(), only the nodes may be changed, not the keys.
  std::vector<Entry>& entries();
  const std::vector<Entry>& entries() const { return entries_; }
  // Further entries of a common state, under keys that are not PathElements (None, a tuple), in
  // order. A load fills them and a save keeps them. No other member uses them.
  Value::Dict& others() { return others_; }
  const Value::Dict& others() const { return others_; }
  // The keys of entries that were neither text nor ints (None, 0.5, a tuple), by the text that they
  // became. A load without a template restores them.
  std::map<std::string, Value>& original_keys() { return original_keys_; }
  const std::map<std::string, Value>& original_keys() const { return original_keys_; }
  auto begin();
  auto end();
  auto begin() const;
  auto end() const;

 private:
  // The index of each key in entries_. The first look-up that may change the object builds it and
  // later ones keep it up to date. It is complete if it has as many keys as there are entries. A
  // copied StateDict starts with an empty one.
  struct Index {
    Index() = default;
    Index(const Index&);
    Index(Index&&) noexcept = default;
    Index& operator=(const Index&);
    Index& operator=(Index&&) noexcept = default;
    std::unordered_map<PathElement, size_t> positions;
  };
  static constexpr size_t kNowhere = ~size_t{0};
  template <typename T, typename Node>
  static decltype(auto) typed(Node& node, const PathElement& key);
  [[noreturn]] void not_found(const PathElement& key) const;
  size_t position_of(const PathElement& key) const;
  void update_index();

  std::vector<Entry> entries_;
  Value::Dict others_;
  std::map<std::string, Value> original_keys_;
  Index index_;
};

using StateList = std::vector<StateNode>;

// One node: a container, a leaf value, a plain tensor (in torch's dialect: the same on every rank
// that has it), or a wrapped entity.
class StateNode {
 public:
  using Variant = std::variant<Value, TensorView, ShardedTensor, ShardedObject,
                               ShardedTensorFactory, LocalNonpersistent, StateDict, StateList>;
  StateNode() noexcept;  // a null value
  template <typename T>
    requires std::is_constructible_v<Value, T> && (!std::is_same_v<std::decay_t<T>, TensorView>)
  StateNode(T&& value) : StateNode(OfValue(), Value(std::forward<T>(value))) {}
  StateNode(TensorView tensor);
  StateNode(ShardedTensor tensor);
  StateNode(ShardedObject object);
  StateNode(ShardedTensorFactory factory);
  StateNode(LocalNonpersistent value);
  StateNode(StateDict dict);
  StateNode(StateList list);
  StateNode(const StateNode&);
  StateNode(StateNode&&) noexcept;
  StateNode& operator=(const StateNode&);
  StateNode& operator=(StateNode&&) noexcept;
  ~StateNode();

  template <typename T>
  T* get_if() {
    return std::get_if<T>(&node_);
  }
  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&node_);
  }
  // The node's content: one of the Variant's types, or the content of a value, by the types of
  // Value::as(). TensorView also matches a tensor inside a value. Throws Error(kInvalidArgument)
  // naming the wanted type and the actual type.
  template <typename T>
  decltype(auto) as() const;
  template <typename T>
    requires std::same_as<T, StateDict> || std::same_as<T, StateList>
  T& as() {
    return const_cast<T&>(std::as_const(*this).as<T>());
  }
  Variant& variant() { return node_; }
  const Variant& variant() const { return node_; }

 private:
  struct OfValue {};
  StateNode(OfValue, Value value) noexcept;
  template <typename T, size_t index = 0>
  static constexpr size_t index_in_variant();
  [[noreturn]] void wrong_type(size_t wanted_index) const;
  [[noreturn]] void wrong_type(Value::Kind wanted) const;

  Variant node_;
};

inline size_t StateDict::size() const { return entries_.size(); }
inline auto StateDict::begin() { return entries_.begin(); }
inline auto StateDict::end() { return entries_.end(); }
inline auto StateDict::begin() const { return entries_.begin(); }
inline auto StateDict::end() const { return entries_.end(); }

template <typename T, size_t index>
constexpr size_t StateNode::index_in_variant() {
  if constexpr (index == std::variant_size_v<Variant>) {
    return index;
  } else if constexpr (std::same_as<T, std::variant_alternative_t<index, Variant>>) {
    return index;
  } else {
    return index_in_variant<T, index + 1>();
  }
}

template <typename T>
decltype(auto) StateNode::as() const {
  const auto* value = get_if<Value>();
  if constexpr (index_in_variant<T>() < std::variant_size_v<Variant>) {
    if constexpr (std::same_as<T, TensorView>) {
      if (value != nullptr && value->kind() == Value::Kind::kTensor) return value->as_tensor();
    }
    if (const T* content = get_if<T>()) return static_cast<const T&>(*content);
    wrong_type(index_in_variant<T>());
  } else {
    if (value == nullptr) wrong_type(Value::kind_for<T>());
    return value->as<T>();
  }
}

template <typename T, typename Node>
decltype(auto) StateDict::typed(Node& node, const PathElement& key) {
  try {
    return node.template as<T>();
  } catch (Error& error) {
    error.with_key(dotted({key}));
    throw;
  }
}

template <typename T>
decltype(auto) StateDict::get(const PathElement& key) {
  return typed<T>(at(key), key);
}

template <typename T>
decltype(auto) StateDict::get(const PathElement& key) const {
  return typed<T>(at(key), key);
}

// The functions below throw Error(kInvalidArgument) if the tree is nested deeper than this.
inline constexpr size_t kMaxStateDepth = 1000;

// Whether the tree contains no factories and no LocalNonpersistent nodes. If so, the functions
// below would not change it.
bool is_plain(const StateDict& state);
// Replaces every factory by what it builds, which must not contain factories. Rethrows a factory's
// error with the factory's key added; exceptions of other types become kInternal.
StateDict build_factories(const StateDict& state);
// `loaded` must have the structure of build_factories(original). Replaces each built subtree by
// what its factory merges from it. Entries that were not loaded, and LocalNonpersistent nodes of
// the original, may be absent from it. Throws Error(kMismatch), naming the path, if the structures
// differ.
StateDict merge_factories(StateDict loaded, const StateDict& original);
// Removes LocalNonpersistent nodes: dict entries and list elements are removed, but a dict that
// becomes empty stays.
StateDict drop_nonpersistent(const StateDict& state);
// Returns `loaded` with the original's LocalNonpersistent values back in their places. The entries
// are in the original's order, followed by those that only `loaded` has. Throws Error(kMismatch) as
// above.
StateDict restore_nonpersistent(StateDict loaded, const StateDict& original);

}  // namespace tilestone
