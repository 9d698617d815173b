// What the subcommands share: the location of the checkpoint, and the error for an unknown key.
#pragma once

#include <string>
#include <vector>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// `follow_links`: read files through any symbolic link.
Location location_of(const std::string& path, bool follow_links);

// Throws Error(kInvalidArgument), with similar keys, for a key that is neither a tensor's nor an
// object's. The library's kNotFound is not used: its exit code means that there is no checkpoint.
[[noreturn]] void refuse_key(const Checkpoint& checkpoint, const std::string& key);

// Throws Error(kInvalidArgument), with similar keys: no key matches any of the patterns.
[[noreturn]] void refuse_pattern(const Checkpoint& checkpoint,
                                 const std::vector<std::string>& patterns);

// "rank 3" for "__3_0.distcp", a data file of stock PyTorch or Megatron-Core; "no rank" for files
// whose names have no rank.
std::string rank_of_stock_file(const std::string& name);

}  // namespace tilestone::cli
