// Functions shared by saves in one call and saves in steps.
#pragma once

#include <functional>
#include <optional>

#include "python/src/bindings.h"

namespace tilestone::python {

// The deadline `seconds` from now.
Deadline end_after(double seconds);

// Adds the rank to an error that Tilestone's Python code raised, as the engine's errors have it.
// Does nothing for other exceptions, or if `ranks` is 1.
void say_rank(const Raised& raised, int rank, int ranks);

// Runs a part of a call as rank `rank` of `ranks`, which its errors then have.
template <typename Work>
auto as_rank(int rank, int ranks, const Work& work) {
  try {
    return work();
  } catch (const Raised& raised) {
    say_rank(raised, rank, ranks);
    throw;
  }
}

// Notes in an exception that it came after the save had published its checkpoint, if that is so.
void say_published(const Raised& raised, const std::optional<SaveResult>& result,
                   const Location& location);

// A function that calls `prepare`, which returns a SaveRequest. `prepare` must outlive it.
std::function<SaveRequest()> request_of(const nb::callable& prepare);

}  // namespace tilestone::python
