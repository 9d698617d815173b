// Attributes that an existing checkpoint gets later.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Adds attributes to a checkpoint that has a manifest, or replaces them: its manifest is published
// again, in one step, under the location's lock. A checkpoint that has them all is left alone.
// Error(kAlreadyExists) if a save is under way there; kUnsupported without a manifest.
void set_attributes(const std::shared_ptr<Storage>& location,
                    const std::map<std::string, std::string>& attributes, Deadline deadline);

}  // namespace tilestone::engine
