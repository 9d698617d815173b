// A run's directory and what CheckpointManager needs of the engine.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/report.h"
#include "python/src/requests.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;
void bind_step_info(nb::module_& m) {
  bind_report<StepInfo>(m, "StepInfo", "What the folder of a run's step holds.",
                        {"step", "name", "state"})
      .def_prop_ro(
          "line", [](const StepInfo& info) { return python_text(run_name(info.lineage)); },
          "The id of the run that saved it; \"older\": it has none.")
      .def_prop_ro(
          "ordinal", [](const StepInfo& info) { return info.lineage.ordinal; },
          "One more than the highest in the directory when its save began; 0: it has no run id.")
      .def_prop_ro(
          "parent",
          [](const StepInfo& info) -> std::optional<uint64_t> {
            if (!info.lineage.parent) return std::nullopt;
            return info.lineage.parent->step;
          },
          "The step that it continues; None: it begins a line, or that is not known.");
}

ManagedRun managed_run(const nb::bytes& path, uint64_t every, const std::optional<Keep>& keep,
                       const std::string& name, bool strict, bool reuse, bool on_hosts) {
  return {Location(path_of(path)), RunOptions{every, keep, name, strict, reuse, on_hosts}};
}

void bind_calls(nb::class_<ManagedRun>& run) {
  run.def(
         "expect_same_steps",
         [](ManagedRun& self, nb::handle comm,
            const std::vector<std::pair<std::string, std::string>>& terms, double seconds) {
           together(comm, seconds, [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
             self.expect_same_steps(ranks, limit(), terms);
           });
         },
         "comm"_a.none(), "terms"_a, "seconds"_a)
      .def("is_due", &ManagedRun::is_due, "step"_a)
      .def("is_saved", &ManagedRun::is_saved, "step"_a)
      .def(
          "save",
          [](ManagedRun& self, nb::handle comm, uint64_t step,
             const std::map<std::string, double>& metrics, bool overwrite, double seconds,
             const nb::callable& difference, const nb::callable& write,
             const nb::callable& once_more) {
            const ManagedRun::SaveWork work = {
                [&](const std::string& folder) {
                  return with_gil("a comparison with a saved step",
                                  [&] { return nb::cast<std::string>(difference(folder)); });
                },
                [&](const std::string& folder, std::shared_ptr<RunStep> begun) {
                  with_gil("the save of a step", [&] { write(folder, std::move(begun)); });
                },
                [&] {
                  return with_gil("a look at a step on the hosts", [&] {
                    return nb::cast<std::optional<std::map<std::string, double>>>(once_more());
                  });
                }};
            together(comm, seconds, [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
              self.save(ranks, step, metrics, true, overwrite, limit, work);
            });
          },
          "comm"_a.none(), "step"_a, "metrics"_a, "overwrite"_a, "seconds"_a, "difference"_a,
          "write"_a, "once_more"_a,
          nb::sig("def save(self, comm: object | None, step: int, metrics: "
                  "collections.abc.Mapping[str, float], overwrite: bool, seconds: float, "
                  "difference: collections.abc.Callable[[str], str], "
                  "write: collections.abc.Callable[[str, RunStep], None], once_more: "
                  "collections.abc.Callable[[], collections.abc.Mapping[str, float] | None]) "
                  "-> None"),
          "Saves a step that is due.")
      .def("failed", &ManagedRun::failed)
      .def(
          "prune_after",
          [](ManagedRun& self, uint64_t step) {
            const nb::gil_scoped_release released;
            self.prune_after(step);
          },
          "step"_a)
      .def("wait", [](ManagedRun& self) { without_gil([&] { self.wait(); }); })
      .def("end", [](ManagedRun& self) { without_gil([&] { self.end(); }); })
      .def(
          "restore",
          [](ManagedRun& self, nb::handle comm, std::optional<uint64_t> step, bool fallback,
             double seconds, const nb::callable& load) {
            return together(comm, seconds,
                            [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
                              return self.restore(ranks, step, fallback, limit,
                                                  [&](uint64_t chosen, const std::string& folder) {
                                                    with_gil("the load of a step",
                                                             [&] { load(chosen, folder); });
                                                  });
                            });
          },
          "comm"_a.none(), "step"_a.none(), "fallback"_a, "seconds"_a, "load"_a,
          nb::sig("def restore(self, comm: object | None, step: int | None, fallback: bool, "
                  "seconds: float, load: collections.abc.Callable[[int, str], None]) "
                  "-> int | None"));
}

}  // namespace

void bind_manager(nb::module_& m) {
  bind_step_info(m);
  nb::class_<ManagedRun> run(m, "ManagedRun", "What a CheckpointManager knows of its run.");
  run.def(nb::new_(&managed_run), "path"_a, "every"_a, "keep"_a.none(), "name"_a, "strict"_a,
          "reuse"_a, "on_hosts"_a);
  bind_calls(run);
  run.def(
         "name_of",
         [](ManagedRun& self, uint64_t step) {
           return without_gil([&] { return self.directory().name_of(step); });
         },
         "step"_a, "The folder of a step: the one that exists, else the one that a save makes.")
      .def(
          "new_name_of",
          [](ManagedRun& self, uint64_t step) { return self.directory().names().name_of(step); },
          "step"_a, "The folder that a save of the step makes.")
      .def("steps",
           [](ManagedRun& self) { return without_gil([&] { return self.directory().steps(); }); })
      .def("latest",
           [](ManagedRun& self) { return without_gil([&] { return self.directory().latest(); }); })
      .def(
          "best",
          [](ManagedRun& self, const Best& rule) {
            return without_gil([&] { return self.directory().best(rule); });
          },
          "rule"_a);
}

}  // namespace tilestone::python
