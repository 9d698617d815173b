#include <tuple>

#include "tilestone/geometry/placement.h"

namespace tilestone {
namespace {

std::vector<std::string_view> components(std::string_view path) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t dot = path.find('.');
    parts.push_back(path.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    path.remove_prefix(dot + 1);
  }
}

// Whether the pattern fits a run of the name's components: reach[i] says that the pattern so far
// can end before component i. O(pattern * name), however many "**" there are.
bool matches(const std::vector<std::string_view>& pattern,
             const std::vector<std::string_view>& name) {
  std::vector<bool> reach(name.size() + 1, true);
  for (std::string_view part : pattern) {
    if (part == "**") {
      for (size_t i = 1; i < reach.size(); ++i) {
        if (reach[i - 1]) reach[i] = true;
      }
      continue;
    }
    for (size_t i = name.size(); i > 0; --i) {
      reach[i] = reach[i - 1] && (part == "*" || part == name[i - 1]);
    }
    reach[0] = false;
  }
  for (bool end : reach) {
    if (end) return true;
  }
  return false;
}

// Compares as "more specific".
std::tuple<int, int> specificity(const std::vector<std::string_view>& pattern) {
  int literals = 0;
  int singles = 0;
  for (std::string_view part : pattern) {
    literals += part != "*" && part != "**" ? 1 : 0;
    singles += part == "*" ? 1 : 0;
  }
  return {literals, singles};
}

}  // namespace

int find_rule(std::span<const PlacementRule> rules, std::string_view name) {
  const auto parts = components(name);
  int best = -1;
  std::tuple<int, int> best_specificity;
  for (size_t i = 0; i < rules.size(); ++i) {
    const auto pattern = components(rules[i].pattern);
    const auto candidate = specificity(pattern);
    if (best >= 0 && candidate <= best_specificity) continue;
    if (!matches(pattern, parts)) continue;
    best = static_cast<int>(i);
    best_specificity = candidate;
  }
  return best;
}

}  // namespace tilestone
