// Deltas between versions of weights.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/report.h"
#include "python/src/requests.h"
#include "tilestone/engine/delta/delta.h"
#include "tilestone/engine/delta/live_internal.h"
#include "tilestone/engine/delta/versions_internal.h"

namespace tilestone::python {

using nb::literals::operator""_a;

namespace {

DeltaOptions delta_options(const OpenOptions& given, nb::handle progress) {
  DeltaOptions options;
  options.reading = given.reading;
  options.checks = given.checks;
  options.resources = given.resources;
  options.progress = to_progress(progress);
  return options;
}

// As a rank of the communicator: `work` gets the call, with a deadline that Python's signals end.
template <typename Work>
auto as_rank_of(const Communicator& comm, const Location& location, Deadline deadline,
                const Work& work) {
  return as_rank(comm.rank(), comm.size(), [&] {
    return without_gil([&](const Stop& stop) {
      return work({comm, location.identity_or_empty(), deadline.with_interrupt(stop)});
    });
  });
}

// `prepare` returns a SaveRequest. `writes`: false only keeps the state as a base. `from`: bytes,
// or None.
DeltaReport save_live(const nb::callable& prepare, const nb::bytes& path, nb::handle comm,
                      double seconds, engine::DeltaBase& base, nb::handle from, bool writes) {
  const Entered entered;
  const Location location(path_of(path));
  const Communicator communicator = to_communicator(comm);
  const Deadline deadline = end_after(seconds);
  std::optional<Location> base_at;
  if (!from.is_none()) base_at.emplace(path_of(nb::cast<nb::bytes>(from)));
  const MadeSave made = made_by(prepare);
  const Deadline end = until(deadline, failure_of(made));
  return as_rank_of(communicator, location, end, [&](const engine::DeltaCall& call) {
    return engine::save_delta(call, view_of(made), base, base_at, writes);
  });
}

// `prepare` returns a LoadRequest, whose arrays are changed. The deltas are the newest first. None:
// the arrays are those of no base, as they may be.
std::optional<DeltaReport> apply_live(const nb::callable& prepare,
                                      const std::vector<nb::bytes>& paths, nb::handle comm,
                                      double seconds, const OpenOptions& options,
                                      bool may_be_other) {
  const Entered entered;
  std::vector<Location> deltas;
  for (const nb::bytes& path : paths) {
    deltas.push_back(location_of(path, options.reading.follow_links));
  }
  const Communicator communicator = to_communicator(comm);
  const Deadline deadline = end_after(seconds);
  const auto made = made_load(prepare);
  const Error* const failed = std::get_if<Error>(&made);
  std::variant<const StateDict*, Error> state;
  if (failed != nullptr) {
    state = *failed;
  } else {
    state = &*std::get<BridgedLoad>(made).wanted;
  }
  const std::optional<DeltaReport> applied = as_rank_of(
      communicator, deltas.at(0), until(deadline, failed), [&](const engine::DeltaCall& call) {
        return engine::apply_in_place(call, state, deltas, options, may_be_other);
      });
  const auto& asked = std::get<BridgedLoad>(made);
  // Tells the bridge which arrays have been changed.
  from_state(*asked.wanted, nb::borrow(kept_object(asked.original)), asked.bridge, {});
  return applied;
}

void bind_live(nb::module_& m) {
  nb::class_<engine::DeltaBase>(m, "DeltaBase", "A version in memory, for the next delta.")
      .def(nb::init<>())
      .def_ro("id", &engine::DeltaBase::id);
  m.def("save_live_delta", &save_live, "prepare"_a, "path"_a, "comm"_a.none(), "seconds"_a,
        "base"_a, "from_"_a.none(), "writes"_a,
        nb::sig("def save_live_delta(prepare: collections.abc.Callable[[], SaveRequest], path: "
                "bytes, comm: object, seconds: float, base: DeltaBase, from_: bytes | None, "
                "writes: bool) -> DeltaReport"));
  m.def("apply_live_deltas", &apply_live, "prepare"_a, "paths"_a, "comm"_a.none(), "seconds"_a,
        "options"_a, "may_be_other"_a,
        nb::sig("def apply_live_deltas(prepare: collections.abc.Callable[[], LoadRequest], paths: "
                "collections.abc.Sequence[bytes], comm: object, seconds: float, options: "
                "OpenOptions, may_be_other: bool) -> DeltaReport | None"));
  m.def(
      "delta_versions",
      [](const nb::bytes& path) {
        const Location location(path_of(path));
        std::vector<std::tuple<uint64_t, std::string, bool>> found;
        for (const auto& [number, whole] :
             without_gil([&] { return engine::versions_at(location); })) {
          found.emplace_back(number, engine::version_name(number), whole);
        }
        return found;
      },
      "path"_a, "(number, name, whether it is whole) of each version in the directory.");
  m.def("version_name", &engine::version_name, "number"_a);
}

}  // namespace

void bind_delta(nb::module_& m) {
  bind_report<DeltaReport>(m, "DeltaReport", "What a delta holds.",
                           {"changed", "unchanged", "added", "removed", "bytes", "whole_bytes"});
  bind_live(m);
  m.def(
      "make_delta",
      [](const nb::bytes& a, const nb::bytes& b, const nb::bytes& path, const OpenOptions& given,
         nb::handle progress) {
        DeltaOptions options = delta_options(given, progress);
        const Location base = location_of(a, given.reading.follow_links);
        const Location now = location_of(b, given.reading.follow_links);
        return without_gil([&](const Stop& stop) {
          options.interrupt = stop;
          return make_delta(base, now, Location(path_of(path)), options);
        });
      },
      "a"_a, "b"_a, "path"_a, "options"_a, "progress"_a.none());
  m.def(
      "apply_delta",
      [](const nb::bytes& base, const nb::bytes& path, const nb::bytes& target,
         const OpenOptions& given, nb::handle progress) {
        DeltaOptions options = delta_options(given, progress);
        const Location from = location_of(base, given.reading.follow_links);
        const Location delta = location_of(path, given.reading.follow_links);
        return without_gil([&](const Stop& stop) {
          options.interrupt = stop;
          return apply_delta(from, delta, Location(path_of(target)), options);
        });
      },
      "base"_a, "path"_a, "target"_a, "options"_a, "progress"_a.none());
}

}  // namespace tilestone::python
