// JSON of files that people or other programs write.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace tilestone {

// Throws Error(kCorrupt), which begins with `what`, for text that is not JSON, for a key that
// occurs twice in an object (readers differ in which they use), and for values nested more than 16
// deep.
nlohmann::json strict_json(std::string_view text, std::string_view what);

}  // namespace tilestone
