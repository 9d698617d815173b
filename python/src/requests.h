// Functions shared by saves in one call and saves in steps.
#pragma once

#include <functional>

#include "python/src/bindings.h"

namespace tilestone::python {

// The deadline `seconds` from now.
Deadline end_after(double seconds);

// Adds the rank to an error that Tilestone's Python code raised, as the engine's errors have it.
// Does nothing for other exceptions, or if `ranks` is 1.
void say_rank(const Raised& raised, int rank, int ranks);

// A function that calls `prepare`, which returns a SaveRequest. `prepare` must outlive it.
std::function<SaveRequest()> request_of(const nb::callable& prepare);

}  // namespace tilestone::python
