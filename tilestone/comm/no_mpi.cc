// Built in place of mpi.cc where there is no MPI.
#include "tilestone/base/error.h"
#include "tilestone/comm/mpi.h"

namespace tilestone {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported, "this build of Tilestone has no MPI")
      .with_hint("install Open MPI (Debian: libopenmpi-dev) and build with TILESTONE_MPI=ON");
}

}  // namespace

Communicator mpi_world(Deadline) { refuse(); }
Communicator mpi_communicator(const void*, Deadline) { refuse(); }

}  // namespace tilestone
