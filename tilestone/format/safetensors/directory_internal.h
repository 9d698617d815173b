// Reads a folder of safetensors files: which of them belong together, and what they hold.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tilestone/format/index.h"
#include "tilestone/state/metadata.h"

namespace tilestone::safetensors {

// The safetensors files, and the indexes of such files, at the top of the directory.
std::vector<std::string> data_files(std::span<const std::string> names);
std::vector<std::string> index_files_among(std::span<const std::string> names);

// What the files hold; Metadata::index() has been called. Error(kCorrupt) or Error(kUnsupported),
// naming file and key.
Metadata read_directory(const DirectoryFiles& files);

}  // namespace tilestone::safetensors
