// Python 3's names of modules, classes and functions that pickles of protocol 2 name as in
// Python 2. Python 3 itself writes that protocol so. Of its table (_compat_pickle) these are the
// rows of what may stand in a state dict. Other names stay as they are, and Python maps them when
// it reads the pickle.
#pragma once

#include <cstdint>
#include <string_view>

namespace tilestone::archive {

struct GlobalName {
  std::string_view module;
  std::string_view name;
};

// The row of the table for a name in Python 2; 0: the name is the same in Python 3.
uint32_t python2_row(GlobalName python2);
// The new name in a row > 0. `name`: the old name, which is kept if only the module was renamed.
GlobalName python3_name(uint32_t row, std::string_view name);

}  // namespace tilestone::archive
