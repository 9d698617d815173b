// The directories of Megatron's runs.
#include "tilestone/engine/training_run/megatron_run_internal.h"

#include <nanobind/stl/vector.h>

#include "python/src/bindings.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;
using engine::MegatronStep;
using TrackedStep =
    std::pair<uint64_t, bool>;  // the iteration, and whether it is the release checkpoint
using RunPath = std::optional<nb::bytes>;

std::optional<Location> run_at(const RunPath& path) {
  return path ? std::optional(Location(path_of(*path))) : std::nullopt;
}

std::optional<std::tuple<uint64_t, bool, std::string>> choose_run(
    const RunPath& load, const RunPath& non_persistent, const RunPath& pretrained,
    std::optional<uint64_t> iteration) {
  const engine::MegatronPlaces places = {run_at(load), run_at(non_persistent), run_at(pretrained),
                                         iteration};
  const auto choice = without_gil([&] { return engine::choose_megatron_step(places); });
  if (!choice) return std::nullopt;
  static constexpr const char* kFrom[] = {"load", "non_persistent", "pretrained"};
  return std::tuple(choice->step.iteration, choice->step.release,
                    kFrom[static_cast<size_t>(choice->from)]);
}

}  // namespace

void bind_megatron_run(nb::module_& m) {
  m.def(
      "read_megatron_tracker",
      [](const nb::bytes& run, const std::string& name) -> TrackedStep {
        const Location location(path_of(run));
        const MegatronStep found =
            without_gil([&] { return engine::read_megatron_tracker(location, name); });
        return {found.iteration, found.release};
      },
      "run"_a, "name"_a, "(iteration, whether it is the release checkpoint).");
  m.def(
      "expect_megatron_run",
      [](const nb::bytes& run) {
        const Location location(path_of(run));
        without_gil([&] { engine::expect_run(location); });
      },
      "run"_a, "Refuses the folder of a checkpoint.");
  m.def("choose_megatron_step", &choose_run, "load"_a.none(), "non_persistent"_a.none(),
        "pretrained"_a.none(), "iteration"_a.none(),
        "(iteration, whether it is the release checkpoint, the place); None: no checkpoint.");
  m.def(
      "move_megatron_tracker",
      [](const nb::bytes& run, uint64_t iteration, bool release, uint64_t interval,
         bool only_newest) {
        const Location location(path_of(run));
        return without_gil([&] {
          return engine::move_megatron_tracker(location, {iteration, release}, interval,
                                               only_newest);
        });
      },
      "run"_a, "iteration"_a, "release"_a, "interval"_a, "only_newest"_a,
      "Returns the folders that the checkpoint replaces.");
  m.def(
      "remove_megatron_steps",
      [](const nb::bytes& run, const std::vector<std::string>& names) {
        const Location location(path_of(run));
        without_gil([&] { engine::remove_megatron_steps(location, names); });
      },
      "run"_a, "names"_a);
}

}  // namespace tilestone::python
