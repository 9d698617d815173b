// Prints a checkpoint's keys as a tree: `tilestone ls --tree`.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "tilestone/cli/commands.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {

// Prints it, or returns it if JSON is wanted.
nlohmann::ordered_json print_tree(const Metadata& metadata, const LsOptions& options);

}  // namespace tilestone::cli
