// What the subcommands share: the location of the checkpoint, and the error for an unknown key.
#pragma once

#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// `follow_links`: read files through any symbolic link (PosixOptions::Links::kAll).
Location location_of(const std::string& path, bool follow_links);

// Throws Error(kInvalidArgument), with similar keys, for a key that is neither a tensor's nor an
// object's. The library's kNotFound is not used: its exit code means that there is no checkpoint.
[[noreturn]] void refuse_key(const Checkpoint& checkpoint, const std::string& key);

}  // namespace tilestone::cli
