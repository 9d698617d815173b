// A zarr checkpoint's directory as metadata: which arrays, chunks and objects its files are.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tilestone/format/index.h"
#include "tilestone/state/metadata.h"

namespace tilestone::zarr {

// In Megatron-Core's metadata.json.
inline constexpr const char* kBackend = "zarr";
inline constexpr int kBackendVersion = 1;

// metadata.json and every `.zarray`. Files of checkpoints in folders below are left out.
std::vector<std::string> description_files(std::span<const std::string> names);
// Every file that may be a chunk or an object.
std::vector<std::string> item_files(std::span<const std::string> names);

// Error(kCorrupt) and (kUnsupported) with file; metadata is index()ed.
Metadata read_directory(const DirectoryFiles& files);

}  // namespace tilestone::zarr
