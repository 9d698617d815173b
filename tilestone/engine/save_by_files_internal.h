// A rank's save without a communicator (SaveOptions::by_files).
#pragma once

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/location.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/state/state_dict.h"

namespace tilestone::engine {

SaveResult save_by_files(const StateDict& state, const Location& location,
                         const SaveOptions& options, Deadline deadline);

}  // namespace tilestone::engine
