// Leaves of a tree as items and back: what the dialects have in common.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tilestone/state/items.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::dialect {

// A dict's key as text: str(key) of Python.
std::string key_text(const PathElement& key);
std::string key_text(const Value& key);

// A plain tensor: the same on every rank that has it.
TensorItem item_of(const TensorView& tensor, std::string key);
// Under its own key, without a path.
TensorItem item_of(const ShardedTensor& tensor);
ObjectItem item_of(const ShardedObject& object);

// What could not be read back is refused before anything is written: kInvalidArgument with the key.
void check_value(const Value& value, const std::string& key);

// The template with what was loaded.
ShardedTensor filled(const ShardedTensor& wanted, const TensorItem& loaded);

// Which keys a tree has given to what. Several sharded tensors of one tree may be shards of one key
// (layers stacked along a prepended axis); any other key is given once.
class KeyClaims {
 public:
  enum class Owner { kPath, kShardedTensor, kShardedObject };
  void reserve(size_t keys) { owners_.reserve(keys); }
  void claim(const std::string& key, Owner owner, const Path& path);

 private:
  std::unordered_map<std::string, Owner> owners_;
};

// Loaded items, in the order in which the template asks for them; Error(kInternal) for another.
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
[[noreturn]] void disagree(const std::string& key);

[[noreturn]] void refuse_unbuilt(const Path& path, std::string_view what);

}  // namespace tilestone::dialect
