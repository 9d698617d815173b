// Ranks as threads of one process: for tests, and for tools that want several ranks' work done
// without a launcher.
#pragma once

#include <functional>
#include <vector>

#include "tilestone/comm/communicator.h"

namespace tilestone {

// The `n` ends of a new group, by rank. n >= 1.
std::vector<Communicator> threads(int n);

// Runs body(communicator) on n threads, one a rank, and returns when all have ended. The first
// error (lowest rank) is rethrown. A rank that throws counts as gone: ranks that wait for it get
// Error(kRankFailed) with its number.
void run_ranks(int n, const std::function<void(Communicator)>& body);

// The same, but every rank's error is returned (null: none), for tests that look at all of them.
std::vector<std::exception_ptr> run_ranks_collect(int n,
                                                  const std::function<void(Communicator)>& body);

}  // namespace tilestone
