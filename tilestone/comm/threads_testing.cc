#include "tilestone/comm/threads_testing.h"

#include <algorithm>
#include <utility>

namespace tilestone {

std::vector<std::exception_ptr> run_ranks_collect(int n,
                                                  const std::function<void(Communicator)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(std::max(n, 0)));
  try {
    run_ranks(n, [&](Communicator comm) {
      const auto rank = static_cast<size_t>(comm.rank());
      try {
        body(std::move(comm));
      } catch (...) {
        errors[rank] = std::current_exception();
        throw;
      }
    });
  } catch (...) {
    // If no rank threw, the group could not be made.
    if (std::all_of(errors.begin(), errors.end(), [](const auto& e) { return !e; })) throw;
  }
  return errors;
}

}  // namespace tilestone
