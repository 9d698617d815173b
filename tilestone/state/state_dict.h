// StateDict: the nested tree that a caller saves, and gets back from a load.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tilestone/state/sharded.h"
#include "tilestone/state/value.h"

namespace tilestone {

class StateNode;

// A dict's key: text, or an int (Megatron's state dicts have both).
using PathElement = std::variant<std::string, int64_t>;
// From the root to a leaf. A list index is an int too.
using Path = std::vector<PathElement>;
// "optimizer.state.0.exp_avg": the path's elements joined by dots, as torch's flattening does.
std::string dotted(const Path& path);

// An ordered dict of nodes.
class StateDict {
 public:
  StateNode& operator[](std::string_view key);          // a null value when it is new
  StateNode& at(const PathElement& key);                // the same for any key
  const StateNode* find(const PathElement& key) const;  // null: absent
  StateNode* find(const PathElement& key);
  size_t size() const;
  bool empty() const { return size() == 0; }
  using Entry = std::pair<PathElement, StateNode>;
  std::vector<Entry>& entries() { return entries_; }
  const std::vector<Entry>& entries() const { return entries_; }
  auto begin();
  auto end();
  auto begin() const;
  auto end() const;

 private:
  std::vector<Entry> entries_;
};

using StateList = std::vector<StateNode>;

// One node: a container, a leaf value, a plain tensor (in torch's dialect: the same on every rank
// that has it), or a wrapped entity.
class StateNode {
 public:
  using Variant = std::variant<Value, TensorView, ShardedTensor, ShardedObject,
                               ShardedTensorFactory, LocalNonpersistent, StateDict, StateList>;
  StateNode() = default;  // a null value
  template <typename T>
    requires std::is_constructible_v<Value, T> && (!std::is_same_v<std::decay_t<T>, TensorView>)
  StateNode(T&& value) : node_(Value(std::forward<T>(value))) {}
  StateNode(TensorView tensor) : node_(std::move(tensor)) {}
  StateNode(ShardedTensor tensor) : node_(std::move(tensor)) {}
  StateNode(ShardedObject object) : node_(std::move(object)) {}
  StateNode(ShardedTensorFactory factory) : node_(std::move(factory)) {}
  StateNode(LocalNonpersistent value) : node_(std::move(value)) {}
  StateNode(StateDict dict) : node_(std::move(dict)) {}
  StateNode(StateList list) : node_(std::move(list)) {}

  template <typename T>
  T* get_if() {
    return std::get_if<T>(&node_);
  }
  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&node_);
  }
  Variant& variant() { return node_; }
  const Variant& variant() const { return node_; }

 private:
  Variant node_;
};

inline size_t StateDict::size() const { return entries_.size(); }
inline auto StateDict::begin() { return entries_.begin(); }
inline auto StateDict::end() { return entries_.end(); }
inline auto StateDict::begin() const { return entries_.begin(); }
inline auto StateDict::end() const { return entries_.end(); }

// Replaces every factory by what it builds. Throws what a factory throws, with the factory's key.
StateDict build_factories(const StateDict& state);
// `loaded` has the structure of build_factories(template): each built subtree becomes what its
// factory merges from it.
StateDict merge_factories(StateDict loaded, const StateDict& original);
// Without LocalNonpersistent nodes (a dict entry or list element goes; an emptied dict stays).
StateDict drop_nonpersistent(const StateDict& state);
// `loaded` with the template's LocalNonpersistent values put back in their places.
StateDict restore_nonpersistent(StateDict loaded, const StateDict& original);

}  // namespace tilestone
