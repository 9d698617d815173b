// Unpublished saves, which are made without a communicator.
#include "python/src/bindings.h"
#include "python/src/report.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

std::vector<UnpublishedSave> unpublished(const nb::bytes& path, double watch) {
  const Location location = location_of(path, false);
  return without_gil([&](const Stop& stop) { return find_unpublished(location, {watch, stop}); });
}

std::string publish_save(const nb::bytes& path, const std::string& save_id, double timeout,
                         int threads) {
  const Location location = location_of(path, false);
  return without_gil(
      [&](const Stop& stop) { return publish(location, {save_id, timeout, threads, stop}); });
}

std::string abandon_save(const nb::bytes& path, const std::string& save_id, double period) {
  const Location location = location_of(path, false);
  return without_gil([&](const Stop& stop) { return abandon(location, {save_id, period, stop}); });
}

}  // namespace

void bind_unpublished(nb::module_& m) {
  bind_report<UnpublishedSave>(m, "UnpublishedSave",
                               "A save without a communicator that is not published yet.",
                               {"save_id", "world_size", "missing_count", "abandoned"})
      .def_prop_ro("complete", &UnpublishedSave::complete,
                   "Whether all its ranks have written, so that it can be published.")
      .def("__str__", [](const UnpublishedSave& save) { return python_text(save.text); });
  m.def("unpublished", &unpublished, "path"_a, "watch"_a);
  m.def("publish", &publish_save, "path"_a, "save_id"_a, "timeout"_a, "threads"_a);
  m.def("abandon", &abandon_save, "path"_a, "save_id"_a, "period"_a);
}

}  // namespace tilestone::python
