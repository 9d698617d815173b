// The checkpoints in tests/golden.
#pragma once

#include <filesystem>
#include <vector>

#include "tilestone/storage/memory_storage.h"

namespace tilestone {

// tests/golden/NAME ("torch-2.14.1/dcp-w4").
std::filesystem::path golden(const std::string& name);
// Those without flattened ranges, sorted.
std::vector<std::filesystem::path> goldens();
// All of them, sorted.
std::vector<std::filesystem::path> all_goldens();
// A folder's files, those of its subfolders too.
FileImage image_of(const std::filesystem::path& folder);

}  // namespace tilestone
