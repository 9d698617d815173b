// Names of files relative to a root, as storages and the files that describe a checkpoint use them.
#pragma once

#include <string_view>

namespace tilestone {

// Error(kUnsafe) unless `name` is a relative path with '/' between components: not empty, without
// NUL, and no component empty, "." or "..".
void check_file_name(std::string_view name);

}  // namespace tilestone
