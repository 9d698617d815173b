#include "tilestone/state/metadata.h"

#include <charconv>
#include <utility>

namespace tilestone {

std::optional<int64_t> int_of_key(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return std::to_string(number) == text ? std::optional(number) : std::nullopt;
}

std::optional<DictKeys> keys_of(const StateDict& dict) {
  bool texts = false;  // some keys are text that reads as an int
  DictKeys keys;
  keys.others = dict.original_keys();
  for (const auto& [key, node] : dict.entries()) {
    if (std::holds_alternative<int64_t>(key)) {
      keys.ints = true;
    } else {
      const std::string& text = std::get<std::string>(key);
      texts = texts || (int_of_key(text) && !keys.others.contains(text));
    }
  }
  if (keys.ints && texts) {
    keys.ints = false;
    for (const auto& [key, node] : dict.entries()) {
      const auto* number = std::get_if<int64_t>(&key);
      if (number != nullptr) keys.others.emplace(std::to_string(*number), *number);
    }
  }
  if (!keys.ints && !texts && keys.others.empty()) return std::nullopt;
  return keys;
}

void restore_keys(StateDict& dict, const DictKeys& keys) {
  for (auto& [key, node] : dict.entries()) {
    const auto* text = std::get_if<std::string>(&key);
    if (text == nullptr) continue;
    if (const auto known = keys.others.find(*text); known != keys.others.end()) {
      if (known->second.kind() != Value::Kind::kInt) {
        dict.original_keys().insert(*known);
        continue;
      }
      key = known->second.as_int();
    } else if (const auto number = keys.ints ? int_of_key(*text) : std::nullopt) {
      key = *number;
    }
  }
}

void add_keys(TreeKeys& known, const TreeKeys& more) {
  for (const auto& [path, keys] : more) {
    DictKeys& into = known[path];
    into.ints = into.ints || keys.ints;
    into.others.insert(keys.others.begin(), keys.others.end());
  }
}

}  // namespace tilestone
