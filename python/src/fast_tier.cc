// The fast tier of a CheckpointManager.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/engine/fast_tier/tier_internal.h"

namespace tilestone::python {
namespace {

using engine::FastOptions;
using engine::Tier;
using nb::literals::operator""_a;

std::shared_ptr<Tier> fast_tier(ManagedRun& run, const nb::bytes& path, uint64_t keep,
                                uint64_t drain_every,
                                std::optional<uint64_t> drain_bytes_per_second, bool reuse,
                                bool copies, const std::vector<std::string>& domains,
                                nb::handle meeting, nb::handle draining, nb::handle copying,
                                double seconds) {
  FastOptions options{path_of(path),          keep, copies, domains, drain_every,
                      drain_bytes_per_second, reuse};
  options.patience = std::min(options.patience, std::chrono::duration<double>(seconds));
  const Communicator drains = to_communicator(draining), copying_by = to_communicator(copying);
  return together(meeting, seconds, [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
    return std::make_shared<Tier>(run, options, ranks, drains, copying_by, limit());
  });
}

std::optional<uint64_t> restore(Tier& self, nb::handle comm, std::optional<uint64_t> step,
                                bool fallback, double seconds, const nb::callable& load) {
  const auto loading = [&](uint64_t chosen, const std::string& folder, const std::string& url) {
    with_gil("the load of a step", [&] { load(chosen, folder, url); });
  };
  return together(comm, seconds, [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
    return self.restore(ranks, step, fallback, limit, loading);
  });
}

nb::str path_on_host(Tier& self, nb::handle comm, uint64_t step, double seconds) {
  const auto work = [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
    return self.path_of(ranks, step, limit());
  };
  return python_text(together(comm, seconds, work));
}

}  // namespace

void bind_fast_tier(nb::module_& m) {
  nb::class_<Tier>(m, "FastTier", "The fast tier of a CheckpointManager.")
      .def(nb::new_(&fast_tier), "run"_a, "path"_a, "keep"_a, "drain_every"_a,
           "drain_bytes_per_second"_a.none(), "reuse"_a, "copies"_a, "domains"_a,
           "meeting"_a.none(), "draining"_a.none(), "copying"_a.none(), "seconds"_a)
      .def(
          "begin",
          [](Tier& self, uint64_t step, bool forced, RunStep& begun) {
            return without_gil([&] { return self.begin(step, forced, begun); });
          },
          "step"_a, "forced"_a, "begun"_a)
      .def("leave", &Tier::leave, "begun"_a, "why"_a,
           "The step is saved straight to the run's directory.")
      .def(
          "has_begun", [](Tier&, const RunStep& begun) { return begun.hosts->has_begun(); },
          "begun"_a, "Whether what the save has raised may be of the hosts.")
      .def(
          "is_full", &Tier::is_full,
          "Whether a save has failed because a host's disk was full, and none went straight since.")
      .def("went_straight", &Tier::went_straight)
      .def(
          "undrained",
          [](Tier& self, uint64_t step, bool or_draining) {
            return without_gil([&] { return self.undrained(step, or_draining); });
          },
          "step"_a, "or_draining"_a,
          "The metrics of a step that this host keeps; None: it has none, or without or_draining "
          "it is copying the step.")
      .def("path_of", &path_on_host, "comm"_a.none(), "step"_a, "seconds"_a,
           nb::sig("def path_of(self, comm: object | None, step: int, seconds: float) -> str"))
      .def("restore", &restore, "comm"_a.none(), "step"_a.none(), "fallback"_a, "seconds"_a,
           "load"_a,
           nb::sig("def restore(self, comm: object | None, step: int | None, fallback: bool, "
                   "seconds: float, load: collections.abc.Callable[[int, str, str], None]) "
                   "-> int | None"))
      .def("wait",
           [](Tier& self) {
             without_gil(
                 [&](const Stop& stop) { self.wait(Deadline::never().with_interrupt(stop)); });
           })
      .def("end", [](Tier& self) { without_gil([&] { self.end(); }); });
}

}  // namespace tilestone::python
