// Functions that all dialects share: leaves of a tree to items and back.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::dialect {

// A dict's key as text, as Python's str(key) has it.
using tilestone::key_text;
std::string key_text(const Value& key);

// The item of a plain tensor, which is the same on every rank that has it.
TensorItem item_of(const TensorView& tensor, std::string key);
// The item of a wrapped entity under its own key. The item's path is empty.
TensorItem item_of(const ShardedTensor& tensor);
ObjectItem item_of(const ShardedObject& object);

// Error(kInvalidArgument), naming the key, if the value could not be read back. Called before
// anything is written.
void check_value(const Value& value, const std::string& key);

// The template's sharded tensor with the loaded pieces.
ShardedTensor filled(ShardedTensor tensor, const TensorItem& loaded);

// Keeps track of the keys in a tree. Several sharded tensors of one tree may be shards of one key
// (layers stacked along a prepended axis); any other key may occur only once.
class KeyClaims {
 public:
  enum class Owner { kPath, kShardedTensor, kShardedObject };
  void reserve(size_t keys) { owners_.reserve(keys); }
  // Error(kInvalidArgument) if the key is already in use. `path`: where the leaf is in the tree.
  void claim(const std::string& key, Owner owner, const Path& path);

 private:
  std::unordered_map<std::string, Owner> owners_;
};

// Returns the loaded items in the order in which the template asks for them. Borrows `items`.
// Error(kInternal) if the next item has another key, or if items are missing or left over.
class LoadedItems {
 public:
  explicit LoadedItems(const Items& items) : items_(items) {}
  const TensorItem& next_tensor(const std::string& key);
  const Value& next_object(const std::string& key);
  void expect_end() const;

 private:
  const Items& items_;
  size_t tensors_ = 0;
  size_t objects_ = 0;
};
// Throws Error(kInternal): the loaded items don't fit the template.
[[noreturn]] void disagree(const std::string& key);

// Throws Error(kInternal): the tree still has a factory or a non-persistent value at `path`.
[[noreturn]] void refuse_unbuilt(const Path& path, std::string_view what);

}  // namespace tilestone::dialect
