// What Python 3 calls the modules, classes and functions that a pickle of protocol 0, 1 or 2 names
// as Python 2 did: the table of Python's own pickle module (_compat_pickle).
#pragma once

#include <cstdint>
#include <string_view>

namespace tilestone::archive {

struct GlobalName {
  std::string_view module;
  std::string_view name;
};

// The row of the table for a name; 0: Python 3 has no other name for it.
uint32_t python2_row(GlobalName python2);
// What a row > 0 says. `name`: the old one, which stays where only the module was renamed.
GlobalName python3_name(uint32_t row, std::string_view name);

}  // namespace tilestone::archive
