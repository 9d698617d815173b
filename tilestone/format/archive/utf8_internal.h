#pragma once

#include <string_view>

namespace tilestone::archive {

// Well-formed UTF-8, lone surrogates allowed: Python pickles its strings so ("surrogatepass").
bool is_utf8(std::string_view text);

}  // namespace tilestone::archive
