// Prints a checkpoint's keys as a tree: `tilestone ls --tree`.
#pragma once

#include "tilestone/cli/commands.h"
#include "tilestone/tilestone.h"

namespace tilestone::cli {

int print_tree(const Metadata& metadata, const LsOptions& options);

}  // namespace tilestone::cli
