// JSON as Values, for small files that people or other programs write.
#pragma once

#include <string_view>

#include "tilestone/state/value.h"

namespace tilestone {

// Objects become dicts, sorted by key, arrays lists. Throws Error(kCorrupt) for text that is not
// JSON, for a key that occurs twice, and for values nested more than 16 deep.
Value value_of_json(std::string_view text);

}  // namespace tilestone
