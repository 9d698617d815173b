// What the subcommands have in common: where they look, and what they refuse of a user's words.
#pragma once

#include <string>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// follow_links: files are read through any symbolic link (PosixOptions::Links::kAll).
Location location_of(const std::string& path, bool follow_links);

// For a key that is neither a tensor's nor an object's: Error(kInvalidArgument) with similar keys.
// The checkpoint is sound; the library's kNotFound would end the command as a missing file does.
[[noreturn]] void refuse_key(const Checkpoint& checkpoint, const std::string& key);

}  // namespace tilestone::cli
