// The checkpoints in tests/golden.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tilestone/state/value.h"
#include "tilestone/storage/memory_storage.h"

namespace tilestone {

// tests/golden/NAME ("torch-2.14.1/dcp-w4").
std::filesystem::path golden(const std::string& name);
// All of them, sorted.
std::vector<std::filesystem::path> goldens();
// A value as the expectations of Megatron-Core's goldens have it: its repr, except that a tensor is
// "tensor DTYPE SHAPE crc32=...", a list "list(...)", a tuple "tuple(...)". Of an enum's member,
// which pickles name in several ways, only the class is told.
std::string golden_text(const Value& value);
// An expectation in which the same holds for members of enums.
std::string without_enum_members(const std::string& text);
// A folder's files, those of its subfolders too.
FileImage image_of(const std::filesystem::path& folder);

}  // namespace tilestone
