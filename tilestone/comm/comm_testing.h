// The conformance suite that every communicator passes. Each function is called by all ranks of
// the group at once, from their own threads or processes, and checks with GoogleTest's EXPECT_*.
#pragma once

#include <cstdint>
#include <functional>

#include "tilestone/comm/communicator.h"

namespace tilestone::comm_testing {

// Waits for all ranks of the group, by other means than the communicator under test.
using Rendezvous = std::function<void()>;

// Every operation, every root, sizes 0, 1, 1 MiB and another for each rank.
void check_every_operation(const Communicator& comm);

// `count` operations drawn from `seed`, with random roots and sizes. The same seed on every rank.
void check_random_operations(const Communicator& comm, uint64_t seed, int count);

// Rank `absent` doesn't make a call: every other rank that depends on it gets kTimeout with its
// number. It makes the call late, and the group goes on in step, for each operation in turn. Needs
// two ranks or more.
void check_missing_caller(const Communicator& comm, int absent, const Rendezvous& rendezvous);

// A bad root and a wrong number of parts are refused, and the group goes on in step.
void check_bad_arguments(const Communicator& comm);

// Two groups that this rank belongs to, used in turn (rows and columns of a grid of ranks).
void check_two_groups(const Communicator& row, const Communicator& column, uint64_t seed);

}  // namespace tilestone::comm_testing
