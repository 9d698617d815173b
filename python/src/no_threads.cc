// Only the package of the tests has ranks as threads and saves in steps (threads_testing.cc).
#include "python/src/bindings.h"

namespace tilestone::python {

void bind_threads(nb::module_&) {}

}  // namespace tilestone::python
