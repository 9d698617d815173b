// Unpublished saves, which are made without a communicator.
#include "python/src/bindings.h"

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
  nb::class_<UnpublishedSave>(m, "UnpublishedSave",
                              "A save without a communicator that is not published yet.")
      .def_ro("save_id", &UnpublishedSave::save_id, "The unique name of this attempt.")
      .def_ro("world_size", &UnpublishedSave::world_size,
              "How many ranks it has; 0 if that is not known.")
      .def_ro("format", &UnpublishedSave::format, "The `format` that was passed to `save`.")
      .def_ro("dialect", &UnpublishedSave::dialect, "The `dialect` that was passed to `save`.")
      .def_ro("missing_count", &UnpublishedSave::missing_count,
              "How many of its ranks have not written.")
      .def_ro("missing", &UnpublishedSave::missing, "The lowest of these ranks, at most 16.")
      .def_prop_ro(
          "failure", [](const UnpublishedSave& save) { return python_text(save.failure); },
          "The error that a rank recorded; empty if none did.")
      .def_ro("abandoned", &UnpublishedSave::abandoned,
              "Whether it was abandoned: it can't be published, and gc removes its files.")
      .def_ro("alive", &UnpublishedSave::alive,
              "Whether one of its ranks is working: True if one of its files changed while it was "
              "watched, False if none changed for a minute, otherwise None.")
      .def_prop_ro("complete", &UnpublishedSave::complete,
                   "Whether all its ranks have written, so that it can be published.")
      .def("__str__", [](const UnpublishedSave& save) { return python_text(save.text); })
      .def("__repr__", [](nb::handle self) {
        return shown(self, {"save_id", "world_size", "missing_count", "abandoned"});
      });
  m.def("unpublished", &unpublished, "path"_a, "watch"_a);
  m.def("publish", &publish_save, "path"_a, "save_id"_a, "timeout"_a, "threads"_a);
  m.def("abandon", &abandon_save, "path"_a, "save_id"_a, "period"_a);
}

}  // namespace tilestone::python
