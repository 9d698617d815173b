// What a directory holds that is not a checkpoint itself, for the error that there is none.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The subdirectories that are checkpoints, in natural order. Hidden ones don't count.
std::vector<std::string> checkpoints_below(Storage& storage);

// A hint, such as "3 subdirectories are checkpoints, the last is step-300: open one of them"; "":
// nothing is recognised. `names`: the files at the location. Lists the directory and those directly
// in it; a failure of that is no failure here.
std::string look_around(Storage& storage, std::span<const std::string> names);

}  // namespace tilestone::engine
