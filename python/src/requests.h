// Functions shared by saves in one call and saves in steps.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "python/src/bindings.h"
#include "tilestone/engine/load/load_internal.h"
#include "tilestone/engine/save/request_internal.h"

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

// Runs what all ranks do together. `work` gets the communicator, and a function that returns when
// what it begins now has to end.
template <typename Work>
auto together(nb::handle comm, double seconds, const Work& work) {
  const Entered entered;
  const Communicator communicator = to_communicator(comm);
  return as_rank(communicator.rank(), communicator.size(), [&] {
    return without_gil([&](const Stop& stop) {
      return work(communicator, [&] { return end_after(seconds).with_interrupt(stop); });
    });
  });
}

// Notes in an exception that it came after the save had published its checkpoint, if that is so.
void say_published(const Raised& raised, const std::optional<SaveResult>& result,
                   const Location& location);

// The session; null if it is something else.
Session* session_of(nb::handle object);

// A rank's request to save, or why it has none. The library is given both, because the other ranks
// must learn of the failure.
using MadeSave = std::variant<engine::SaveRequest, Error>;

// Calls `prepare`, which returns a request of type T. An exception becomes the Error, which has it
// as its cause.
template <typename T>
std::variant<T, Error> made_of(const nb::callable& prepare) {
  try {
    return with_gil("making the state dict", [&] {
      const auto began = std::chrono::steady_clock::now();
      T made = std::move(nb::cast<T&>(prepare()));
      made.preparing =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
      return made;
    });
  } catch (...) {
    return current_error();
  }
}
inline MadeSave made_by(const nb::callable& prepare) {
  return made_of<engine::SaveRequest>(prepare);
}
engine::MadeRequest view_of(const MadeSave& made);
// Whether the error was caused by KeyboardInterrupt or SystemExit.
bool ends_the_program(const Error& error);
// The deadline of a rank that takes part in a save or load with this outcome of making its state. A
// rank that was to end (KeyboardInterrupt, SystemExit) waits for the others a few seconds only.
Deadline until(Deadline deadline, const Error* failed);
inline const Error* failure_of(const MadeSave& made) { return std::get_if<Error>(&made); }

// A Python function that makes a rank's request.
using MakesSave = nb::typed<nb::callable, engine::SaveRequest()>;
// A Python function that is called when something has happened.
using Told = nb::typed<nb::callable, nb::object()>;

// What any save begins with: its place, who takes part, and this rank's request.
struct SaveStart {
  Location location;
  SaveOptions options;
  Session* session;  // null: none
  int rank, ranks;
  Deadline deadline;
  MadeSave made;
};
// `bare`: of a save by files, the request without its state; otherwise null. `comm`: a communicator
// or session; by files a session or None.
SaveStart start_of(const MakesSave& prepare, const nb::bytes& path, nb::handle comm, double seconds,
                   const engine::SaveRequest* bare);

// A rank's request for a load, and the bridge that made its tree.
struct BridgedLoad {
  std::optional<StateDict> wanted;  // nullopt: everything
  Location location;
  LoadOptions options;
  Bridge bridge;
  std::shared_ptr<const void> original = nullptr;  // the template's dict
  double preparing = 0;                            // seconds
  std::optional<engine::OptimizerRequest> optimizer = std::nullopt;
};
// The same for a load, whose `prepare` returns a LoadRequest.
inline std::variant<BridgedLoad, Error> made_load(const nb::callable& prepare) {
  return made_of<BridgedLoad>(prepare);
}

}  // namespace tilestone::python
