#include <tuple>

#include "tilestone/base/error.h"
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

// Whether the pattern matches a sequence of the name's components. reach[i] says that the pattern
// so far can end before component i. O(pattern * name), regardless of the number of "**".
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

using Specificity = std::tuple<int, int, int>;  // greater means more specific

Specificity specificity(const std::vector<std::string_view>& pattern) {
  int literals = 0;
  int singles = 0;
  int runs = 0;
  for (std::string_view part : pattern) {
    literals += part != "*" && part != "**" ? 1 : 0;
    singles += part == "*" ? 1 : 0;
    runs += part == "**" ? 1 : 0;
  }
  return {literals, singles, -runs};
}

[[noreturn]] void refuse_tie(std::string_view name, const std::string& a, const std::string& b) {
  throw Error(ErrorCode::kInvalidArgument, "the rules '" + a + "' and '" + b +
                                               "' are equally specific, and both match '" +
                                               std::string(name) + "'")
      .with_hint("give one of them another literal component of the name");
}

}  // namespace

int find_rule(std::span<const PlacementRule> rules, std::string_view name) {
  const auto parts = components(name);
  int best = -1;
  int rival = -1;  // another rule as specific as the best one
  Specificity best_specificity;
  for (size_t i = 0; i < rules.size(); ++i) {
    const auto pattern = components(rules[i].pattern);
    const auto candidate = specificity(pattern);
    if (best >= 0 && candidate < best_specificity) continue;
    if (!matches(pattern, parts)) continue;
    rival = best >= 0 && candidate == best_specificity ? best : -1;
    best = static_cast<int>(i);
    best_specificity = candidate;
  }
  if (rival >= 0) {
    refuse_tie(name, rules[static_cast<size_t>(rival)].pattern,
               rules[static_cast<size_t>(best)].pattern);
  }
  return best;
}

}  // namespace tilestone
