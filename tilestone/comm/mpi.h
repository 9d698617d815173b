// Communicators over MPI. In a build without MPI these functions throw Error(kUnsupported).
//
// All ranks of the communicator that is duplicated must make the same call. After the deadline it
// throws Error(kTimeout). (MPI_Init, which is called if MPI is not initialised yet, waits for all
// ranks of the job without a deadline.) MPI must allow calls from the threads that use the result.
// With MPI_THREAD_MULTIPLE any thread may call MPI; with less, a warning is logged once.
//
// MPI does not report that a process has died. A rank that has died leads to Error(kTimeout) that
// names it, or to Error(kRankFailed) if MPI reports an error. By default mpirun kills the whole job
// when one process dies. With `mpirun --enable-recovery` the others continue and get the error.
#pragma once

#include "tilestone/comm/communicator.h"

namespace tilestone {

// A duplicate of MPI_COMM_WORLD. If MPI is not initialised, initialises it (MPI_THREAD_MULTIPLE)
// and finalises it at exit. It does not finalise MPI if a rank was missing in an operation and has
// sent nothing since, because MPI_Finalize would wait for that rank forever. mpirun reports this as
// an improper exit.
Communicator mpi_world(Deadline deadline = Deadline::never());

// A duplicate of any MPI communicator. `handle` points to an MPI_Comm (opaque, so that this header
// does not need mpi.h). The MPI_Comm may be freed after the call.
Communicator mpi_communicator(const void* handle, Deadline deadline = Deadline::never());

}  // namespace tilestone
