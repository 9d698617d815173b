// The direct children of a value, and all parts of it.
#pragma once

#include <algorithm>
#include <unordered_set>

#include "tilestone/state/value.h"

namespace tilestone {

// Calls visit(child) for each direct child of a container or opaque object, in order. A key comes
// before its item, and a dict's attributes come last.
template <typename Visit>
void for_each_child(const Value& value, const Visit& visit) {
  const auto list = [&](const Value::List& items) {
    std::for_each(items.begin(), items.end(), visit);
  };
  const auto dict = [&](const Value::Dict& entries) {
    for (const auto& [key, item] : entries) {
      visit(key);
      visit(item);
    }
  };
  switch (value.kind()) {
    case Value::Kind::kList:
    case Value::Kind::kTuple:
      return list(value.items());
    case Value::Kind::kDict:
      dict(value.as_dict());
      return visit(value.attributes());
    case Value::Kind::kOpaque: {
      const Opaque& opaque = value.as_opaque();
      list(opaque.args);
      dict(opaque.keywords);
      visit(opaque.state);
      list(opaque.appended);
      return dict(opaque.entries);
    }
    default:
      return;
  }
}

// Calls visit(part) for the value and then for what is in it, if that returns true, and so on. A
// shared part (Value::shared_id()) is visited as often as it occurs.
template <typename Visit>
void for_each_part(const Value& value, const Visit& visit) {
  if (!visit(value)) return;
  for_each_child(value, [&](const Value& child) { for_each_part(child, visit); });
}

inline bool holds_tensors(const Value& value) {
  bool found = false;
  std::unordered_set<const void*> seen;
  for_each_part(value, [&](const Value& part) {
    found = found || part.kind() == Value::Kind::kTensor;
    const void* const shared = part.shared_id();
    return !found && (shared == nullptr || seen.insert(shared).second);
  });
  return found;
}

}  // namespace tilestone
