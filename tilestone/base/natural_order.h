// The order in which people list names: numbers in them by value.
#pragma once

#include <string_view>

namespace tilestone {

// "layers.2.w" before "layers.10.w". Names that differ only in leading zeros are ordered as text.
bool natural_less(std::string_view a, std::string_view b);

}  // namespace tilestone
