// What the subcommands share: the location of the checkpoint, and the error for an unknown key.
#pragma once

#include <string>
#include <vector>

#include "tilestone/tilestone.h"

namespace tilestone::cli {

// Whether the name is that of a file that is opened like a checkpoint: .safetensors, .pt, ...
bool is_file_opened(const std::string& path);

// `follow_links`: read files through any symbolic link.
Location location_of(const std::string& path, bool follow_links);

// Throws Error(kInvalidArgument), with similar keys, for a key that is neither a tensor's nor an
// object's. The library's kNotFound is not used: its exit code means that there is no checkpoint.
[[noreturn]] void refuse_key(const Checkpoint& checkpoint, const std::string& key);

// The key that `given` means: itself, or else the one that is shown so because it holds characters
// that are not printed ("a\nb").
std::string key_named(const Checkpoint& checkpoint, const std::string& given);

// The patterns that match no key.
std::vector<std::string> unmatched_patterns(const Checkpoint& checkpoint,
                                            const std::vector<std::string>& patterns);
// Throws Error(kInvalidArgument), with similar keys: no key matches these patterns.
[[noreturn]] void refuse_patterns(const Checkpoint& checkpoint,
                                  const std::vector<std::string>& patterns);

// Says how to print the common state, which has no key, if the checkpoint has one.
void print_notes(const std::vector<std::string>& notes);  // of Metadata
void print_about_common(const Checkpoint& checkpoint);

// "rank 3" for "__3_0.distcp", a data file of stock PyTorch or Megatron-Core; "no rank" for files
// whose names have no rank.
std::string rank_of_stock_file(const std::string& name);

}  // namespace tilestone::cli
