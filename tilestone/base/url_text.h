#pragma once

#include <string>
#include <string_view>

namespace tilestone {

// Percent-encodes each byte but A-Z a-z 0-9 - . _ ~ and those of `keep`.
std::string url_encode(std::string_view text, std::string_view keep = "");
// The reverse, where + is a space, as in lists of keys. A % without two hex digits stays.
std::string url_decode(std::string_view text);

}  // namespace tilestone
