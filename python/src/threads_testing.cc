// Ranks as threads, short leases, and the boxes of placements, for the tests of the Python package.
#include "tilestone/comm/threads_testing.h"
#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/storage/lease.h"

namespace tilestone::python {

using nb::literals::operator""_a;

void bind_steps(nb::module_& m);  // in steps_testing.cc

void bind_threads(nb::module_& m) {
  bind_steps(m);
  m.def(
      "_run_ranks",
      [](int n, nb::callable body) {
        auto kept = keep_alive(body);
        without_gil([&] {
          run_ranks(n, [&](Communicator comm) {
            nb::gil_scoped_acquire held;
            try {
              kept_object(kept)(comm);
            } catch (const nb::python_error& raised) {
              throw error_of(raised, "rank " + std::to_string(comm.rank()));
            }
          });
        });
      },
      "n"_a, "body"_a,
      "Runs body(comm) on n threads of this process, one per rank, and returns when all have "
      "ended. If a rank raises, the ranks that wait for it get RankFailedError. If several ranks "
      "raise, the original error is raised, not one that it caused on another rank.");
  m.def(
      "_set_lease_period",
      [](double seconds) { set_lease_period(std::chrono::duration<double>(seconds)); }, "seconds"_a,
      "How often this process and its children renew their claims in object stores.");
  m.def(
      "_boxes_of",
      [](const Dims& shape, const Mesh& mesh, const Dims& coordinate,
         const std::vector<Placement>& placements, const std::optional<Dims>& local_shape) {
        LocalBoxes found = local_shape
                               ? held_boxes(shape, mesh, coordinate, placements, *local_shape)
                               : local_boxes(shape, mesh, coordinate, placements);
        return std::tuple(std::move(found.local_shape), std::move(found.boxes),
                          std::move(found.locals));
      },
      "shape"_a, "mesh"_a, "coordinate"_a, "placements"_a, "local_shape"_a.none());
}

}  // namespace tilestone::python
