// Ranks of an MPI job. Needs a build with MPI; without one, these throw kUnsupported.
//
// Both calls are collective over the communicator that is duplicated; past the deadline they throw
// kTimeout. (MPI_Init, which mpi_world() calls when nobody has, waits for all ranks of the job
// without one.) MPI must allow calls from the threads that use the result: with
// MPI_THREAD_MULTIPLE any may; with less, a warning is logged once.
//
// MPI does not report that a process has died: a rank that is gone shows as Error(kTimeout) naming
// it, unless MPI itself reports an error for it (kRankFailed). mpirun by itself kills the whole
// job when one process dies; with `mpirun --enable-recovery` the others live and get the error.
#pragma once

#include "tilestone/comm/communicator.h"

namespace tilestone {

// A duplicate of MPI_COMM_WORLD. Initialises MPI (MPI_THREAD_MULTIPLE) when nobody has, and then
// finalises it at exit; but not when a rank was missing in an operation and never heard of again,
// since MPI_Finalize would wait for it for ever. mpirun calls that an improper exit.
Communicator mpi_world(Deadline deadline = Deadline::never());

// A duplicate of any MPI communicator. `handle` points at an MPI_Comm (kept opaque, so that this
// header needs no mpi.h); it may be freed after the call.
Communicator mpi_communicator(const void* handle, Deadline deadline = Deadline::never());

}  // namespace tilestone
