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
#include "tilestone/engine/fast_tier/fast_tier.h"

namespace tilestone::python {
namespace {

using nb::literals::operator""_a;

void bind_pending(nb::module_& m) {
  nb::class_<Pending>(m, "Pending", "A step of a save that ends on another thread.")
      .def("done", &Pending::done)
      .def(
          "result",
          [](const Pending& self, double seconds) {
            const auto length = self.done() ? WithoutGil::kShort : WithoutGil::kLong;
            without_gil(
                [&](const Stop& stop) {
                  self.get(end_after(seconds).with_interrupt(stop), seconds);
                },
                length);
          },
          "seconds"_a)
      .def(
          "on_done",
          [](const Pending& self, const nb::callable& callback) {
            self.on_done([kept = keep_alive(callback)] {
              with_gil("a callback of a save", [&] { kept_object(kept)(); });
            });
          },
          "callback"_a,
          nb::sig("def on_done(self, callback: collections.abc.Callable[[], object]) -> None"));
}

// Runs what all ranks of the tier do together.
template <typename Work>
auto of_all(nb::handle comm, double seconds, const Work& work) {
  const Entered entered;
  const Communicator ranks = to_communicator(comm);
  return as_rank(ranks.rank(), ranks.size(), [&] {
    return without_gil([&](const Stop& stop) {
      return work(ranks, [&] { return end_after(seconds).with_interrupt(stop); });
    });
  });
}

FastTier fast_tier(ManagedRun& run, const nb::bytes& path, uint64_t keep, uint64_t drain_every,
                   std::optional<uint64_t> drain_bytes_per_second, bool reuse, bool copies,
                   const std::vector<std::string>& domains, nb::handle meeting, nb::handle draining,
                   nb::handle copying, double seconds) {
  FastOptions options{path_of(path),          keep, copies, domains, drain_every,
                      drain_bytes_per_second, reuse};
  options.patience = std::min(options.patience, std::chrono::duration<double>(seconds));
  const Communicator drains = to_communicator(draining), copying_by = to_communicator(copying);
  return of_all(meeting, seconds, [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
    return FastTier(run, options, ranks, drains, copying_by, limit());
  });
}

std::optional<uint64_t> restore(FastTier& self, nb::handle comm, std::optional<uint64_t> step,
                                bool fallback, double seconds, const nb::callable& load) {
  const auto loading = [&](uint64_t chosen, const std::string& folder, const std::string& url) {
    with_gil("the load of a step", [&] { load(chosen, folder, url); });
  };
  return of_all(comm, seconds, [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
    return self.restore(ranks, step, fallback, limit, loading);
  });
}

std::string url_of(FastTier& self, nb::handle comm, uint64_t step, double seconds) {
  return of_all(comm, seconds, [&](const Communicator& ranks, const ManagedRun::Limit& limit) {
    return self.url_of(ranks, step, limit());
  });
}

}  // namespace

void bind_fast_tier(nb::module_& m) {
  bind_pending(m);
  nb::class_<FastTier>(m, "FastTier", "The fast tier of a CheckpointManager.")
      .def(nb::new_(&fast_tier), "run"_a, "path"_a, "keep"_a, "drain_every"_a,
           "drain_bytes_per_second"_a.none(), "reuse"_a, "copies"_a, "domains"_a,
           "meeting"_a.none(), "draining"_a.none(), "copying"_a.none(), "seconds"_a)
      .def(
          "begin",
          [](FastTier& self, uint64_t step, bool forced, RunStep& begun) {
            return without_gil([&] { return self.begin(step, forced, begun); });
          },
          "step"_a, "forced"_a, "begun"_a)
      .def("leave", &FastTier::leave, "begun"_a, "why"_a,
           "The step is saved straight to the run's directory.")
      .def("has_begun", &FastTier::has_begun, "begun"_a,
           "Whether what the save has raised may be of the hosts.")
      .def(
          "is_full", &FastTier::is_full,
          "Whether a save has failed because a host's disk was full, and none went straight since.")
      .def("went_straight", &FastTier::went_straight)
      .def("url_of", &url_of, "comm"_a.none(), "step"_a, "seconds"_a,
           nb::sig("def url_of(self, comm: object | None, step: int, seconds: float) -> str"))
      .def("restore", &restore, "comm"_a.none(), "step"_a.none(), "fallback"_a, "seconds"_a,
           "load"_a,
           nb::sig("def restore(self, comm: object | None, step: int | None, fallback: bool, "
                   "seconds: float, load: collections.abc.Callable[[int, str, str], None]) "
                   "-> int | None"))
      .def("wait",
           [](FastTier& self) {
             without_gil(
                 [&](const Stop& stop) { self.wait(Deadline::never().with_interrupt(stop)); });
           })
      .def("end", [](FastTier& self) { without_gil([&] { self.end(); }); });
}

}  // namespace tilestone::python
