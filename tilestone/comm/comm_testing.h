// The conformance suite that every communicator must pass. All ranks of the group call each
// function at once, from their own threads or processes. It checks with GoogleTest's EXPECT_*.
#pragma once

#include <cstdint>
#include <functional>

#include "tilestone/comm/communicator.h"

namespace tilestone::comm_testing {

// Waits for all ranks of the group without using the communicator under test.
using Rendezvous = std::function<void()>;

// Checks every operation with sizes of 0, 1 and 1 MiB and a size per rank.
void check_every_operation(const Communicator& comm);

// Checks `count` random operations with random sizes. All ranks must pass the same seed.
void check_random_operations(const Communicator& comm, uint64_t seed, int count);

// For each operation: rank `absent` does not call it. Every other rank that depends on it must get
// kTimeout with its number. Then `absent` calls it late, and the group must be in step. Needs at
// least two ranks.
void check_missing_caller(const Communicator& comm, int absent, const Rendezvous& rendezvous);

// A wrong number of parts must be refused, and the group must stay in step.
void check_bad_arguments(const Communicator& comm);

// Uses two groups of this rank alternately (rows and columns of a grid of ranks).
void check_two_groups(const Communicator& row, const Communicator& column, uint64_t seed);

}  // namespace tilestone::comm_testing
