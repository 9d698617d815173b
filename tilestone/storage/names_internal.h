// Names of files in a storage, as strings.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace tilestone {

// The directory of a name ("" at the top) and the last component.
std::pair<std::string_view, std::string_view> split_name(std::string_view name);
inline std::string_view parent_name(std::string_view name) { return split_name(name).first; }

// check_file_name, but "" (the root) is a directory's name too.
void check_directory_name(std::string_view name);

// Error(kInvalidArgument) "what: ..." where two directories are one, or one is within the other.
void check_apart(const std::string& a, const std::string& b, const std::string& what);

}  // namespace tilestone
