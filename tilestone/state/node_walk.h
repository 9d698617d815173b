// A walk over the nodes of a state dict.
#pragma once

#include <type_traits>
#include <utility>

#include "tilestone/state/state_dict.h"

namespace tilestone {

// Calls visit(node, path) for each node below a dict or list, or for a node and each below it, in
// order; a container comes before its children. `visit` may change or replace the node; what is
// then in it is visited. The depth of the recursion is that of the tree.
template <typename Tree, typename Visit>
void for_each_node(Tree& tree, const Visit& visit, Path&& path = {}) {
  const auto child = [&](PathElement element, auto& node) {
    path.push_back(std::move(element));
    for_each_node(node, visit, std::move(path));
    path.pop_back();
  };
  if constexpr (std::is_same_v<std::remove_const_t<Tree>, StateDict>) {
    for (auto& [key, node] : tree) child(key, node);
  } else if constexpr (std::is_same_v<std::remove_const_t<Tree>, StateList>) {
    for (size_t i = 0; i < tree.size(); ++i) child(static_cast<int64_t>(i), tree[i]);
  } else {
    visit(tree, std::as_const(path));
    if (auto* dict = tree.template get_if<StateDict>())
      for_each_node(*dict, visit, std::move(path));
    if (auto* list = tree.template get_if<StateList>())
      for_each_node(*list, visit, std::move(path));
  }
}

}  // namespace tilestone
