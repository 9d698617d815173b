// Ranks as threads of one process: for tests, and for tools that want several ranks' work done
// without a launcher.
#pragma once

#include <functional>
#include <vector>

#include "tilestone/comm/communicator.h"

namespace tilestone {

// Each rank has a thread of its own, and messages to all others.
inline constexpr int kMaxThreadRanks = 4096;

// The `n` ends of a new group, by rank. Error(kInvalidArgument) unless 1 <= n <= kMaxThreadRanks.
std::vector<Communicator> threads(int n);

// Runs body(communicator) on n threads, one a rank, and returns when all have ended. A rank that
// throws counts as gone: ranks that wait for it get Error(kRankFailed) with its number. Of several
// errors the original is rethrown: the one whose rank() is the rank that threw it, else the one
// that the first error in time, by rank(), leads to.
void run_ranks(int n, const std::function<void(Communicator)>& body);

// The same, but every rank's error is returned (null: none), for tests that look at all of them.
std::vector<std::exception_ptr> run_ranks_collect(int n,
                                                  const std::function<void(Communicator)>& body);

}  // namespace tilestone
