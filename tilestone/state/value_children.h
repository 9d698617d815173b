// What stands directly in a value.
#pragma once

#include <algorithm>

#include "tilestone/state/value.h"

namespace tilestone {

// Calls visit(child) for each value that stands in a container or opaque object, in its order: keys
// before their items, a dict's attributes last.
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

}  // namespace tilestone
