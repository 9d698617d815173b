// Declarations for the tests of the MPI communicator, in addition to mpi.h.
#pragma once

#include <cstddef>

#include "tilestone/comm/communicator.h"

namespace tilestone::comm_internal {

// MPI counts bytes as int, so a longer message is sent in fragments of this many bytes.
inline constexpr size_t kFragmentBytes = size_t{1} << 30;
// A broadcast of more bytes goes down a tree. A smaller one goes from the root to each rank.
inline constexpr size_t kTreeBytes = size_t{64} << 10;

// mpi_communicator with other limits, so that tests can test fragments with little memory. All
// ranks must pass the same limits. `handle` is an MPI_Comm*.
Communicator mpi_communicator(const void* handle, size_t fragment_bytes, size_t tree_bytes,
                              Deadline deadline = Deadline::never());

}  // namespace tilestone::comm_internal
