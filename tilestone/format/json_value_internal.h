// JSON as Values.
#pragma once

#include <string_view>

#include "tilestone/state/value.h"

namespace tilestone {

// Objects become dicts, sorted by key, arrays lists. Throws as strict_json().
Value value_of_json(std::string_view text, std::string_view what);

}  // namespace tilestone
