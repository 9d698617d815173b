// Reads the directory of a zarr checkpoint: which arrays, chunks and objects its files are.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tilestone/format/index.h"
#include "tilestone/state/metadata.h"

namespace tilestone::zarr {

// The sharded_backend and its version in Megatron-Core's metadata.json.
inline constexpr const char* kBackend = "zarr";
inline constexpr int kBackendVersion = 1;

// metadata.json and every `.zarray`. Ignores files of other checkpoints in subfolders.
std::vector<std::string> description_files(std::span<const std::string> names);
// Every file that may be a chunk or an object. Ignores files of other checkpoints in subfolders.
std::vector<std::string> item_files(std::span<const std::string> names);

// What the checkpoint holds; Metadata::index() has been called. Error(kCorrupt) or
// Error(kUnsupported), naming the file.
Metadata read_directory(const DirectoryFiles& files);

}  // namespace tilestone::zarr
