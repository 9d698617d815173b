// Sessions: what is kept from one save to the next.
#include <optional>
#include <string>
#include <utility>

#include "python/src/bindings.h"
#include "python/src/report.h"
#include "python/src/requests.h"
#include "tilestone/engine/session_internal.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

// Creates a session. All ranks of `comm` must call it together, within `seconds`. If `check` raises
// on any rank, all ranks raise.
Session made_session(nb::handle comm, double seconds, const nb::object& check) {
  const Entered entered;
  const Communicator communicator = to_communicator(comm);
  const Deadline deadline = end_after(seconds);
  std::optional<Error> failed;
  try {
    with_gil("checking a session's arguments", [&] { check(); });
  } catch (...) {
    failed = current_error();
  }
  const Deadline end = until(deadline, failed ? &*failed : nullptr);
  return as_rank(communicator.rank(), communicator.size(), [&] {
    return without_gil([&](const Stop& stop) {
      return engine::OfSession::make(communicator, end.with_interrupt(stop), failed);
    });
  });
}

// `make` returns a request with the state. Nothing is written, and no other rank takes part.
uint64_t prepare(Session& session, const MakesSave& make,
                 std::optional<uint64_t> max_staged_bytes) {
  const Entered entered;
  const MadeSave made = made_by(make);
  return without_gil([&] {
    const engine::MadeRequest view = view_of(made);
    const engine::RequestView& request = engine::expect_made(view);
    AsyncOptions async;
    async.max_staged_bytes = max_staged_bytes;
    return session.prepare(*request.state, *request.options, async);
  });
}

ByFiles by_files(Session& session, const nb::bytes& path) {
  const Location location(path_of(path));
  const nb::gil_scoped_release released;
  return session.by_files(location);
}

}  // namespace

Session* session_of(nb::handle object) {
  return nb::isinstance<Session>(object) ? &nb::cast<Session&>(object) : nullptr;
}

void bind_session(nb::module_& m) {
  bind_report<SessionStats>(m, "SessionStats", "A session's counters, on this rank.",
                            {"saves", "plans_exchanged", "plans_from_cache", "plan_bytes_sent"});
  nb::class_<Session>(m, "Session", "What one rank keeps from one save to the next.")
      .def(nb::new_(&made_session), "comm"_a.none(), "seconds"_a, "check"_a)
      .def(nb::new_([](nb::handle comm) { return engine::OfSession::of(to_communicator(comm)); }),
           "comm"_a.none())
      .def(nb::new_([](int rank, int world_size, std::string token) {
             return Session(rank, world_size, std::move(token));
           }),
           "rank"_a, "world_size"_a, "token"_a)
      .def_prop_ro("rank", &Session::rank)
      .def_prop_ro("size", &Session::world_size)
      .def_prop_ro("token", &Session::token)
      .def_prop_ro("stats", &Session::stats)
      .def("prepare", &prepare, "make"_a, "max_staged_bytes"_a.none(),
           "Prepares staging memory for a state; returns its size in bytes.")
      .def("by_files", &by_files, "path"_a,
           "This rank's part in the next save by files to a path. Each call counts as one save.");
}

}  // namespace tilestone::python
