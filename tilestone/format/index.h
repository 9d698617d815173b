// The index of a checkpoint: the files that describe it. They are published one after the other.
// One of them is the switch: once it is in place, the checkpoint exists.
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
  kBefore,  // before the switch; on its own it is not a checkpoint
  kSwitch,  // the switch; exactly one file
  kAfter,   // after the switch; a checkpoint is valid without it
};
std::string_view to_string(IndexRole role);  // "before", "switch", "after"

struct IndexFile {
  std::string name;  // relative to the checkpoint
  Bytes bytes;
  IndexRole role = IndexRole::kSwitch;
};
using Index = std::vector<IndexFile>;  // in the order of publishing

// The index of a checkpoint: the files of the format and of the dialect. If both have a file of the
// same name, the dialect's file is used. If both have a switch, the dialect's is the switch, and
// the format's gets the role kBefore. Sorted by role, otherwise in the order given.
// Error(kInternal) unless there is exactly one switch.
Index merge_index(Index of_format, Index of_dialect);

// Error(kInternal) if there is no switch.
const IndexFile& switch_file(const Index& index);

// What has been read of a large file.
struct FileParts {
  uint64_t size = 0;                // of the whole file, bytes
  std::map<uint64_t, Bytes> parts;  // by offset in the file
  friend bool operator==(const FileParts&, const FileParts&) = default;
};

// A directory as formats and dialects see it: file names, and what they have asked for.
struct DirectoryFiles {
  std::vector<std::string> names;         // of all files below the directory, sorted
  FileImage contents;                     // the bytes of the index files
  std::map<std::string, uint64_t> sizes;  // of the files in Format::sized_files(), bytes
  // Of the files in Format::self_describing_files().
  std::map<std::string, FileParts> parts = {};

  bool contains(std::string_view name) const;  // whether `names` contains it
};
// Whether `names`, which must be sorted, contains `name`.
bool contains_name(std::span<const std::string> names, std::string_view name);

}  // namespace tilestone
