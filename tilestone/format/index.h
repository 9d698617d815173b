// The index of a checkpoint: the files that describe it. They are published one after the other,
// and one of them is the switch: once it is in place the checkpoint exists.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/file_image.h"

namespace tilestone {

// When a file of the index is published.
enum class IndexRole : uint8_t {
  kBefore,  // before the switch; a directory that holds it without the switch is no checkpoint
  kSwitch,  // exactly one file
  kAfter,   // after the switch; a checkpoint may lack it
};
std::string_view to_string(IndexRole role);  // "before", "switch", "after"

struct IndexFile {
  std::string name;  // relative to the checkpoint
  Bytes bytes;
  IndexRole role = IndexRole::kSwitch;
};
using Index = std::vector<IndexFile>;  // in the order of publishing

// The index of a checkpoint: the format's files and the dialect's. Where both give a file of one
// name, or a switch, the dialect's stands and the format's switch is published before it. Sorted by
// role, otherwise in the order given. Error(kInternal) unless there is exactly one switch.
Index merge_index(Index of_format, Index of_dialect);

// The name of the switch.
const std::string& switch_name(const Index& index);

// A directory as formats and dialects see it: names, and what they asked for.
struct DirectoryFiles {
  std::vector<std::string> names;         // of all files below it, sorted
  FileImage contents;                     // of the files that describe the checkpoint
  std::map<std::string, uint64_t> sizes;  // in bytes, of Format::sized_files()

  bool contains(std::string_view name) const;  // whether it is one of `names`
};
// Whether sorted `names` hold `name`.
bool contains_name(std::span<const std::string> names, std::string_view name);

}  // namespace tilestone
