// Access to the checkpoints in tests/golden.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tilestone/state/value.h"
#include "tilestone/storage/memory_storage_testing.h"

namespace tilestone {

// The path tests/golden/NAME; an example of a name is "torch-2.14.1/dcp-w4".
std::filesystem::path golden(const std::string& name);
// The paths of all golden checkpoints, sorted.
std::vector<std::filesystem::path> goldens();
// A value as text in the form of the .expected.json files of Megatron-Core's goldens. This is the
// value's repr, except that a tensor is "tensor DTYPE SHAPE crc32=...", a list is "list(...)" and a
// tuple is "tuple(...)". An enum member is shown by its class only, because pickles name members in
// several ways.
std::string golden_text(const Value& value);
// An expected text with enum members shown by their class only, as golden_text() does.
std::string without_enum_members(const std::string& text);
// The files of a folder and of its subfolders.
FileImage image_of(const std::filesystem::path& folder);

}  // namespace tilestone
