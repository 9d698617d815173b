// Leaves of a template that a load has left alone.
#pragma once

#include <string>
#include <unordered_set>

namespace tilestone {

// What of one rank's template was not loaded, as LoadOptions's policies let it: its leaves are the
// template's own.
struct KeptLeaves {
  std::unordered_set<std::string> keys;   // of items; wrapped entities are known by these
  std::unordered_set<std::string> paths;  // dotted; unwrapped leaves are known by these
};

}  // namespace tilestone
