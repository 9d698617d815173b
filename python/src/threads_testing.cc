// Ranks as threads, and short leases, for the tests of the Python package.
#include "tilestone/comm/threads_testing.h"
#include "python/src/bindings.h"
#include "python/src/requests.h"
#include "tilestone/storage/lease.h"

namespace tilestone::python {

using nb::literals::operator""_a;

void bind_threads(nb::module_& m) {
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
}

}  // namespace tilestone::python
