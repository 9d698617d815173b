// Ranks as threads of one process, for tests.
#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "tilestone/comm/communicator.h"

namespace tilestone {

// The limit exists because each rank is a thread and sends messages to all others.
inline constexpr int kMaxThreadRanks = 4096;

// The `n` ends of a new group, by rank. Error(kInvalidArgument) unless 1 <= n <= kMaxThreadRanks.
std::vector<Communicator> threads(int n);

// Runs body(communicator) on n threads, one per rank, and returns when all have ended. A rank that
// throws counts as gone: ranks that wait for it get Error(kRankFailed) with its number. If several
// ranks throw, the original error is rethrown: an error whose rank() is the rank that threw it. If
// there is none, it is found by following rank() from the error that was thrown first.
void run_ranks(int n, const std::function<void(Communicator)>& body);

// As run_ranks(), but returns what each rank threw (null: nothing).
std::vector<std::exception_ptr> run_ranks_collect(int n,
                                                  const std::function<void(Communicator)>& body);

}  // namespace tilestone
