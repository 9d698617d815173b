// Deltas between versions of weights.
#include <nanobind/stl/string.h>

#include <string>

#include "python/src/bindings.h"
#include "tilestone/engine/delta/delta.h"

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

void bind_report(nb::module_& m) {
  nb::class_<DeltaReport>(m, "DeltaReport", "What a delta holds.")
      .def_ro("base", &DeltaReport::base,
              "The id of the version that it changes: 64 hex digits, equal only for versions with "
              "the same keys, dtypes, shapes and bits.")
      .def_ro("result", &DeltaReport::result, "The id of the version that it leads to.")
      .def_ro("unchanged", &DeltaReport::unchanged, "Number of tensors.")
      .def_ro("changed", &DeltaReport::changed)
      .def_ro("added", &DeltaReport::added, "With those whose dtype or shape has changed.")
      .def_ro("removed", &DeltaReport::removed)
      .def_ro("left_out", &DeltaReport::left_out,
              "Number of objects of the new version, which are not in the delta.")
      .def_ro("bytes", &DeltaReport::bytes, "Of the delta's files.")
      .def_ro("whole_bytes", &DeltaReport::whole_bytes, "Of the new version's tensors.")
      .def_ro("seconds", &DeltaReport::seconds)
      .def("__repr__", [](const DeltaReport& report) {
        return "DeltaReport(changed=" + std::to_string(report.changed) +
               ", unchanged=" + std::to_string(report.unchanged) +
               ", added=" + std::to_string(report.added) +
               ", removed=" + std::to_string(report.removed) +
               ", bytes=" + std::to_string(report.bytes) +
               ", whole_bytes=" + std::to_string(report.whole_bytes) + ")";
      });
}

}  // namespace

void bind_delta(nb::module_& m) {
  bind_report(m);
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
