#pragma once

#include <string_view>

namespace tilestone::archive {

// Whether the text is UTF-8. Lone surrogates are allowed, because Python pickles strings with
// "surrogatepass".
bool is_utf8(std::string_view text);

}  // namespace tilestone::archive
