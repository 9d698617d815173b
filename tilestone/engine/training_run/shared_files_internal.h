// Files that steps of a run share (SaveOptions::reuse).
#pragma once

#include <string>
#include <vector>

#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::engine {

// The other steps that have this file of a step as a link, by their folders' names. Looks at the
// files of the rank that wrote it. None where files have one name each, as in an object store.
// Failures are logged.
std::vector<std::string> steps_that_share(const RunDirectory& run, const std::string& folder,
                                          const std::string& file);

}  // namespace tilestone::engine
