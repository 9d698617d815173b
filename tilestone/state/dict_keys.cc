#include "tilestone/state/metadata.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/number_text.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {
namespace {

bool begins_with(const Path& path, const Path& begin) {
  return path.size() >= begin.size() && std::equal(begin.begin(), begin.end(), path.begin());
}

// Whether none of the sorted paths is the path, or is above or below it.
bool is_free(const Path& path, const std::vector<const Path*>& items) {
  const auto at = [&](const Path& wanted) {
    const auto found =
        std::lower_bound(items.begin(), items.end(), wanted,
                         [](const Path* item, const Path& value) { return *item < value; });
    return found == items.end() ? nullptr : *found;
  };
  const Path* const next = at(path);
  if (next != nullptr && begins_with(*next, path)) return false;
  for (Path above(path.begin(), path.end() - 1); !above.empty(); above.pop_back()) {
    const Path* const item = at(above);
    if (item != nullptr && *item == above) return false;
  }
  return true;
}

}  // namespace

std::optional<int64_t> int_of_key(std::string_view text) {
  const auto number = number_in<int64_t>(text);
  return number && std::to_string(*number) == text ? number : std::nullopt;
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

std::vector<Path> empty_dicts(const TreeKeys& dicts, std::vector<const Path*> items) {
  const auto is_empty = [](const auto& dict) {
    return dict.second.empty && !dict.first.empty() && dict.first.size() <= kMaxStateDepth;
  };
  if (std::none_of(dicts.begin(), dicts.end(), is_empty)) return {};
  std::sort(items.begin(), items.end(), [](const Path* a, const Path* b) { return *a < *b; });
  std::vector<Path> found;
  for (auto dict = dicts.rbegin(); dict != dicts.rend(); ++dict) {  // the deepest first
    if (!is_empty(*dict)) continue;
    const bool has_empty = !found.empty() && begins_with(found.back(), dict->first);
    if (!has_empty && is_free(dict->first, items)) found.push_back(dict->first);
  }
  return found;
}

std::vector<Path> empty_dicts(const Metadata& metadata) {
  std::vector<Path> at_top;  // of the items without a path
  at_top.reserve(metadata.tensors.size() + metadata.objects.size());
  std::vector<const Path*> items;
  const auto add = [&](const std::string& key, const Path& path) {
    if (path.empty()) at_top.push_back({key});
    items.push_back(path.empty() ? &at_top.back() : &path);
  };
  for (const StoredTensor& tensor : metadata.tensors) add(tensor.key, tensor.path);
  for (const StoredObject& object : metadata.objects) add(object.key, object.path);
  return empty_dicts(metadata.dict_keys, std::move(items));
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
    if (keys.empty && !into.empty) into.order = keys.order;
    into.empty = into.empty || keys.empty;
  }
}

}  // namespace tilestone
