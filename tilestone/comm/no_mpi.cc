// Replaces mpi.cc if MPI is not available.
#include "tilestone/base/error.h"
#include "tilestone/comm/communicator.h"

namespace tilestone {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported, "this build of Tilestone does not support MPI")
      .with_hint(
          "wheels have no MPI: install an MPI library (Debian: libopenmpi-dev) and build Tilestone "
          "from source, with `pip install .` in its source tree, or with CMake and "
          "TILESTONE_MPI=ON");
}

}  // namespace

Communicator mpi_world(Deadline) { refuse(); }
Communicator mpi_communicator(const void*, Deadline) { refuse(); }

}  // namespace tilestone
