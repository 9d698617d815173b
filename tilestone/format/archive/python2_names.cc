#include "tilestone/format/archive/python2_names_internal.h"

#include <algorithm>
#include <iterator>

namespace tilestone::archive {
namespace {

// The first row counts whose module is equal, and whose name is equal or empty. An empty new name
// is the old one.
struct Row {
  std::string_view module;
  std::string_view name;
  std::string_view new_module;
  std::string_view new_name;
};

constexpr Row kRows[] = {
    {"__builtin__", "long", "builtins", "int"},
    {"__builtin__", "reduce", "functools", "reduce"},
    {"__builtin__", "unicode", "builtins", "str"},
    {"__builtin__", "xrange", "builtins", "range"},
    {"UserDict", "IterableUserDict", "collections", "UserDict"},
    {"ConfigParser", "", "configparser", ""},
    {"Queue", "", "queue", ""},
    {"UserList", "", "collections", ""},
    {"UserString", "", "collections", ""},
    {"__builtin__", "", "builtins", ""},
    {"_abcoll", "", "collections.abc", ""},
    {"copy_reg", "", "copyreg", ""},
    {"exceptions", "", "builtins", ""},
    {"urlparse", "", "urllib.parse", ""},
};

}  // namespace

uint32_t python2_row(GlobalName python2) {
  const auto* row = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& each) {
    return each.module == python2.module && (each.name.empty() || each.name == python2.name);
  });
  return row == std::end(kRows) ? 0 : static_cast<uint32_t>(row - std::begin(kRows)) + 1;
}

GlobalName python3_name(uint32_t row, std::string_view name) {
  const Row& found = kRows[row - 1];
  return {found.new_module, found.new_name.empty() ? name : found.new_name};
}

}  // namespace tilestone::archive
