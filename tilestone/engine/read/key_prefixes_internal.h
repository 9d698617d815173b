// The prefixes of a stored key: which paths of a tree it is below.
#pragma once

#include <string>
#include <string_view>

#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

// Calls visit(prefix, elements) for each prefix of a stored key's path until it returns true.
// `prefix` is dotted, `elements` is the number of its path elements. If no path is recorded, visits
// the prefixes of the key, with `elements` 0.
template <typename Visit>
bool any_prefix(const std::string& key, const Path& path, const Visit& visit) {
  std::string prefix;
  for (size_t i = 0; i < path.size(); ++i) {
    if (!prefix.empty()) prefix += '.';
    prefix += key_text(path[i]);
    if (visit(std::string_view(prefix), i + 1)) return true;
  }
  if (!path.empty()) return false;
  for (size_t dot = key.find('.'); dot != std::string::npos; dot = key.find('.', dot + 1)) {
    if (visit(std::string_view(key).substr(0, dot), size_t{0})) return true;
  }
  return visit(std::string_view(key), size_t{0});
}

}  // namespace tilestone::engine
