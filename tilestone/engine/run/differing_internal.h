// Reports what the ranks of a save hold differently, though only one version of it is saved.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/engine/run/options.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone::engine {

// Reports differences, ordered by key. Throws Error(kMismatch), naming keys and ranks, if
// `common_differs` is kError or if ranks contest a chunk, in which a parameter would be lost.
// Otherwise logs a warning for each key. The same warning is logged once in the process, because a
// trainer saves the same state many times.
void tell_of_differing(const std::vector<DifferingContent>& differing,
                       Checks::Differing common_differs, std::string_view dialect);

// By rank: the keys of which another rank's version is saved.
std::vector<std::vector<std::string>> lost_of(const std::vector<DifferingContent>& differing,
                                              size_t ranks);
// Logs on another rank than the coordinator that its versions are not saved, once for each key.
void tell_of_lost(int rank, const std::vector<std::string>& keys);

}  // namespace tilestone::engine
