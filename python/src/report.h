// How Python sees the structs that calls return.
#pragma once

#include <nanobind/stl/map.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/reports.h"

namespace tilestone::python {

// Seconds by the name of the step.
using Timings = nb::typed<nb::dict, nb::str, nb::float_>;
Timings dict_of(const std::vector<StepTime>& timings);

// Binds a struct with its fields as attributes. repr() shows those that are named here.
template <typename Report>
nb::class_<Report> bind_report(nb::module_& m, const char* name, const char* about,
                               std::vector<const char*> in_repr) {
  nb::class_<Report> bound(m, name, about);
  ReportFields<Report>::each([&](const char* field, auto member, const char* text) {
    using Field = std::remove_cvref_t<decltype(std::declval<Report>().*member)>;
    if constexpr (std::is_same_v<Field, std::string>) {
      bound.def_prop_ro(
          field, [=](const Report& report) { return python_text(report.*member); }, text);
    } else if constexpr (std::is_same_v<Field, std::vector<StepTime>>) {
      bound.def_prop_ro(field, [=](const Report& report) { return dict_of(report.*member); }, text);
    } else if constexpr (std::is_enum_v<Field>) {
      bound.def_prop_ro(
          field, [=](const Report& report) { return std::string(to_string(report.*member)); },
          text);
    } else if constexpr (!std::is_same_v<Field, Lineage>) {
      bound.def_ro(field, member, text);
    }
  });
  bound.def("__repr__",
            [names = std::move(in_repr)](nb::handle self) { return shown(self, names); });
  return bound;
}

}  // namespace tilestone::python
