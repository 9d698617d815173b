// File names relative to a root, as used in storages and in the index files of a checkpoint.
#pragma once

#include <string_view>

namespace tilestone {

// Throws Error(kUnsafe) unless `name` is a relative path with '/' between components. It must not
// be empty or contain NUL, and no component may be empty, "." or "..".
void check_file_name(std::string_view name);

}  // namespace tilestone
