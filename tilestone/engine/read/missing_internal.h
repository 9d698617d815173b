// The error for keys that are requested but not in the checkpoint.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"

namespace tilestone::engine {

// Throws Error(kNotFound) if several of the requested keys are not in the checkpoint, or one is and
// a common prefix explains it: it counts them, lists the first ones, and its hint names the prefix
// ("_orig_mod.", "module.", "model.") that would make them match, or the options that help. A
// single other key is left to the error of reading it, which knows more.
void expect_all_stored(std::span<const TensorItem> tensors, const std::vector<std::string>& objects,
                       const Metadata& metadata);

// For the error of one missing key: similar keys, and the option that loads the others.
Hint hint_at_missing(const Metadata& metadata, const std::string& key);

}  // namespace tilestone::engine
