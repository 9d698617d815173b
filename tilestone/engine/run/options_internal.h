// What the numbers in the options must be.
#pragma once

#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"

namespace tilestone::engine {

// Of a save without a communicator: more is a mistake, and would make who looks for missing ranks
// look for ever.
inline constexpr int kMaxWorldSize = 1 << 20;

// Error(kInvalidArgument) that names the option, its value and what is expected.
void check_options(const SaveOptions& options);
void check_options(const LoadOptions& options);
void check_options(const OpenOptions& options);

// Of these alone what says who takes part in a save by files, which options.by_files must be.
void check_by_files(const SaveOptions& options);

// When a call with this timeout ends. One that is no timeout gives the default: a call with such
// an option still has its first round, in which check_options refuses it for all ranks.
Deadline deadline_of(double timeout);

}  // namespace tilestone::engine
