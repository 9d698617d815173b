// The keys of a checkpoint as a tree, by the dots and slashes in them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "tilestone/base/natural_order.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {

struct KeyNode {
  struct Natural {
    using is_transparent = void;
    bool operator()(std::string_view a, std::string_view b) const { return natural_less(a, b); }
  };
  // By the next part of the key; a part that a slash ends has it at its end.
  std::map<std::string, KeyNode, Natural> children;
  uint64_t tensors = 0;  // of the whole subtree
  uint64_t objects = 0;
  uint64_t bytes = 0;                    // of tensors as a whole, and of objects' items
  const StoredTensor* tensor = nullptr;  // whose key ends here
  const StoredObject* object = nullptr;
};

// The tree of all keys that match one of the patterns; of all keys if there are none.
KeyNode tree_of_keys(const Metadata& metadata, const std::vector<std::string>& patterns);

}  // namespace tilestone::cli
