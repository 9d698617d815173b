#include "tilestone/format/index.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {

std::string_view to_string(IndexRole role) {
  switch (role) {
    case IndexRole::kBefore:
      return "before";
    case IndexRole::kSwitch:
      return "switch";
    case IndexRole::kAfter:
      return "after";
  }
  return "unknown";
}

Index merge_index(Index of_format, Index of_dialect) {
  const auto is_switch = [](const IndexFile& file) { return file.role == IndexRole::kSwitch; };
  const bool dialect_switches = std::any_of(of_dialect.begin(), of_dialect.end(), is_switch);
  Index merged;
  for (IndexFile& file : of_format) {
    const bool replaced =
        std::any_of(of_dialect.begin(), of_dialect.end(),
                    [&](const IndexFile& other) { return other.name == file.name; });
    if (replaced) continue;
    if (dialect_switches && is_switch(file)) file.role = IndexRole::kBefore;
    merged.push_back(std::move(file));
  }
  std::move(of_dialect.begin(), of_dialect.end(), std::back_inserter(merged));
  std::stable_sort(merged.begin(), merged.end(),
                   [](const IndexFile& a, const IndexFile& b) { return a.role < b.role; });
  if (std::count_if(merged.begin(), merged.end(), is_switch) != 1) {
    throw Error(ErrorCode::kInternal, "the index of a checkpoint needs exactly one switch");
  }
  return merged;
}

const IndexFile& switch_file(const Index& index) {
  for (const IndexFile& file : index) {
    if (file.role == IndexRole::kSwitch) return file;
  }
  throw Error(ErrorCode::kInternal, "the index of a checkpoint has no switch");
}

bool contains_name(std::span<const std::string> names, std::string_view name) {
  return std::binary_search(names.begin(), names.end(), name, std::less<>());
}

bool DirectoryFiles::contains(std::string_view name) const { return contains_name(names, name); }

}  // namespace tilestone
