// The direct children of a value.
#pragma once

#include <algorithm>

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

}  // namespace tilestone
