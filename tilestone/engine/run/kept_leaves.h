// The leaves of a template that a load did not fill.
#pragma once

#include <string>
#include <unordered_set>

namespace tilestone {

// The leaves of one rank's template that were not loaded, because LoadOptions's policies allowed
// it. They keep the template's values.
struct KeptLeaves {
  std::unordered_set<std::string> keys;   // of items; these identify wrapped entities
  std::unordered_set<std::string> paths;  // dotted; these identify unwrapped leaves
};

}  // namespace tilestone
