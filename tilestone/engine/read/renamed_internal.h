// Other names for what a checkpoint holds, for a load with LoadOptions::rename.
#pragma once

#include <functional>
#include <string>

#include "tilestone/state/metadata.h"

namespace tilestone::engine {

// Renames the tensors and objects; "": the key is hidden. Error(kInvalidArgument), naming the new
// key, if two keys get the same name. The paths of renamed keys are forgotten.
void rename_keys(Metadata& metadata, const std::function<std::string(const std::string&)>& rename);

}  // namespace tilestone::engine
