// A run's directory and what CheckpointManager needs of the engine.
#include <nanobind/stl/map.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/requests.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;
void bind_step_info(nb::module_& m) {
  const auto text = [](std::string StepInfo::* field) {
    return [field](const StepInfo& info) { return python_text(info.*field); };
  };
  nb::class_<StepInfo>(m, "StepInfo", "What the folder of a run's step holds.")
      .def_ro("step", &StepInfo::step)
      .def_prop_ro("name", text(&StepInfo::name), nb::sig("def name(self) -> str"),
                   "The folder's name in the run's directory.")
      .def_prop_ro(
          "state", [](const StepInfo& info) { return std::string(to_string(info.state)); },
          "\"durable\": a complete checkpoint. \"unfinished\": it is being saved, or its save "
          "ended "
          "early. \"damaged\": a checkpoint that can't be read, or whose files are missing or cut. "
          "\"foreign\": a checkpoint that Tilestone can't read.")
      .def_prop_ro("problem", text(&StepInfo::problem), nb::sig("def problem(self) -> str"),
                   "Why it is not durable; empty if it is.")
      .def_ro("is_saved_to", &StepInfo::is_saved_to,
              "Whether a save, a repair or a removal is under way there.")
      .def_ro("is_link", &StepInfo::is_link,
              "Whether the folder is a symbolic link. Such a step is never removed.")
      .def_ro("format", &StepInfo::format)
      .def_ro("dialect", &StepInfo::dialect)
      .def_prop_ro("writer", text(&StepInfo::writer), nb::sig("def writer(self) -> str"),
                   "The program that saved it.")
      .def_ro("bytes", &StepInfo::bytes, "Bytes of all its files.")
      .def_ro("time", &StepInfo::time, "When it was saved, in seconds since 1970; None: not known.")
      .def_ro("attributes", &StepInfo::attributes)
      .def_ro("metrics", &StepInfo::metrics, "The metrics that were given when it was saved.")
      .def_prop_ro(
          "line", [](const StepInfo& info) { return python_text(run_name(info.lineage)); },
          nb::sig("def line(self) -> str"),
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
          "The step that it continues; None: it begins a line, or that is not known.")
      .def("__repr__", [](const StepInfo& info) {
        return "StepInfo(step=" + std::to_string(info.step) + ", name='" + info.name +
               "', state='" + std::string(to_string(info.state)) + "')";
      });
}

ManagedRun managed_run(const nb::bytes& path, uint64_t every, const std::optional<Keep>& keep,
                       const std::string& name, bool strict) {
  return {Location(path_of(path)), RunOptions{every, keep, name, strict}};
}

// Runs a part of a manager's call that communicates.
template <typename Work>
auto together(nb::handle comm, double seconds, const Work& work) {
  const Entered entered;
  const Communicator communicator = to_communicator(comm);
  const Deadline deadline = end_after(seconds);
  return as_rank(communicator.rank(), communicator.size(), [&] {
    return without_gil(
        [&](const Stop& stop) { return work(communicator, deadline.with_interrupt(stop)); });
  });
}

void bind_saving(nb::class_<ManagedRun>& run) {
  run.def(
         "expect_same_steps",
         [](ManagedRun& self, nb::handle comm, double seconds) {
           together(comm, seconds, [&](const Communicator& ranks, Deadline deadline) {
             self.expect_same_steps(ranks, deadline);
           });
         },
         "comm"_a.none(), "seconds"_a)
      .def("is_due", &ManagedRun::is_due, "step"_a)
      .def("is_saved", &ManagedRun::is_saved, "step"_a)
      .def(
          "saved_before",
          [](ManagedRun& self, nb::handle comm, uint64_t step, double seconds) {
            return together(comm, seconds, [&](const Communicator& ranks, Deadline deadline) {
              return self.saved_before(ranks, step, deadline);
            });
          },
          "comm"_a.none(), "step"_a, "seconds"_a)
      .def(
          "is_settled",
          [](ManagedRun& self, nb::handle comm, uint64_t step, const std::string& folder,
             const std::string& difference, const std::map<std::string, double>& metrics,
             bool overwrite, double seconds) {
            return together(comm, seconds, [&](const Communicator& ranks, Deadline deadline) {
              return self.is_settled(ranks, step, folder, difference, metrics, overwrite, deadline);
            });
          },
          "comm"_a.none(), "step"_a, "folder"_a, "difference"_a, "metrics"_a, "overwrite"_a,
          "seconds"_a)
      .def(
          "make_room",
          [](ManagedRun& self, nb::handle comm, uint64_t step, double seconds) {
            together(comm, seconds, [&](const Communicator& ranks, Deadline deadline) {
              self.make_room(ranks, step, deadline);
            });
          },
          "comm"_a.none(), "step"_a, "seconds"_a)
      .def(
          "begin",
          [](ManagedRun& self, nb::handle comm, uint64_t step,
             const std::map<std::string, double>& metrics) {
            const Communicator ranks = to_communicator(comm);
            return without_gil([&] { return self.begin(ranks, step, metrics); });
          },
          "comm"_a.none(), "step"_a, "metrics"_a)
      .def(
          "saved",
          [](ManagedRun& self, uint64_t step, std::shared_ptr<RunStep> begun) {
            self.saved(step, std::move(begun));
          },
          "step"_a, "begun"_a)
      .def("failed", &ManagedRun::failed)
      .def(
          "prune_after",
          [](ManagedRun& self, uint64_t step) {
            const nb::gil_scoped_release released;
            self.prune_after(step);
          },
          "step"_a)
      .def("wait", [](ManagedRun& self) { without_gil([&] { self.wait(); }); });
}

void bind_restoring(nb::class_<ManagedRun>& run) {
  nb::class_<ManagedRun::Chosen>(run, "Chosen", "A step that was chosen for a restore.")
      .def_ro("step", &ManagedRun::Chosen::step)
      .def_ro("name", &ManagedRun::Chosen::name);
  run.def(
         "choose",
         [](ManagedRun& self, nb::handle comm, std::optional<uint64_t> step, bool fallback,
            double seconds) {
           return together(comm, seconds, [&](const Communicator& ranks, Deadline deadline) {
             return self.choose(ranks, step, fallback, deadline);
           });
         },
         "comm"_a.none(), "step"_a.none(), "fallback"_a, "seconds"_a)
      .def(
          "choose_again",
          [](ManagedRun& self, nb::handle comm, const ManagedRun::Chosen& failed,
             const std::string& problem, bool fallback, double seconds) {
            return together(comm, seconds, [&](const Communicator& ranks, Deadline deadline) {
              return self.choose_again(ranks, failed, problem, fallback, deadline);
            });
          },
          "comm"_a.none(), "failed"_a, "problem"_a, "fallback"_a, "seconds"_a)
      .def("restored", &ManagedRun::restored, "chosen"_a);
}

}  // namespace

void bind_manager(nb::module_& m) {
  bind_step_info(m);
  nb::class_<ManagedRun> run(m, "ManagedRun", "What a CheckpointManager knows of its run.");
  run.def(nb::new_(&managed_run), "path"_a, "every"_a, "keep"_a.none(), "name"_a, "strict"_a);
  bind_saving(run);
  bind_restoring(run);
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
