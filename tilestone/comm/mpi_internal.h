// What the tests of the MPI communicator need beside mpi.h.
#pragma once

#include <cstddef>

#include "tilestone/comm/communicator.h"

namespace tilestone::comm_internal {

// MPI counts in int, so a longer message goes in pieces of this many bytes.
inline constexpr size_t kPieceBytes = size_t{1} << 30;
// A broadcast of more bytes goes down a tree; less, straight from the root to everybody.
inline constexpr size_t kTreeBytes = size_t{64} << 10;

// mpi_communicator with other limits, so that tests see pieces without gigabytes of memory. The
// same on every rank. handle: an MPI_Comm*.
Communicator mpi_communicator(const void* handle, size_t piece_bytes, size_t tree_bytes,
                              Deadline deadline = Deadline::never());

}  // namespace tilestone::comm_internal
