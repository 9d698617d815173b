// Functions on the names of files and directories in a storage.
#pragma once

#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace tilestone {

// The directory part of a name ("" if there is none) and the last component.
std::pair<std::string_view, std::string_view> split_name(std::string_view name);
inline std::string_view parent_name(std::string_view name) { return split_name(name).first; }

// Whether check_file_name() accepts the name: another program may have made it.
bool is_file_name(std::string_view name);

// Like check_file_name, but also accepts "" (the root).
void check_directory_name(std::string_view name);

// Calls `act` with each name. A failure does not end this; the first one is thrown at the end.
template <typename Act>
void for_each_name(std::span<const std::string> names, const Act& act) {
  std::exception_ptr failure;
  for (const std::string& name : names) {
    try {
      act(name);
    } catch (...) {
      if (failure == nullptr) failure = std::current_exception();
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

// Error(kInvalidArgument) "what: ..." if the two directories are the same or one is within the
// other.
void check_apart(const std::string& a, const std::string& b, const std::string& what);

}  // namespace tilestone
