// Files that steps of a run share (SaveOptions::reuse).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone::engine {

// The first of these folders that has a checkpoint of Tilestone: the save of a later one may have
// failed in the background, which no rank need know, and which is removed from `folders`. The first
// one if none has, which is said where it is read. Null: there is no folder.
std::shared_ptr<const Location> step_to_reuse(const RunDirectory& run,
                                              std::vector<std::string>& folders);

// The other steps that have this file of a step as a link, by their folders' names. Looks at the
// files of the rank that wrote it. None where files have one name each, as in an object store.
// Failures are logged.
std::vector<std::string> steps_that_share(const RunDirectory& run, const std::string& folder,
                                          const std::string& file);

}  // namespace tilestone::engine
