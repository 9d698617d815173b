// What saves in one call and saves in steps have in common.
#pragma once

#include <functional>

#include "python/src/bindings.h"

namespace tilestone::python {

// `seconds` from now.
Deadline end_after(double seconds);

// An error of Tilestone's own Python code names the rank, as those of the engine do.
void say_rank(const Raised& raised, int rank, int ranks);

// Calls `prepare`, which makes a SaveRequest and must outlive the function.
std::function<SaveRequest()> request_of(const nb::callable& prepare);

}  // namespace tilestone::python
