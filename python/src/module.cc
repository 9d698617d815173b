// The table of contents of tilestone._core.
#include "python/src/bindings.h"

NB_MODULE(_core, m) {
  using namespace tilestone::python;
  m.doc() = "The engine of tilestone; use the package `tilestone`.";
  // Objects that a traceback or a global keeps until the interpreter's end are not leaks.
  nb::set_leak_warnings(false);
  m.attr("VERSION") = tilestone::kVersion;
  bind_errors(m);
  bind_log(m);
  bind_geometry(m);
  bind_tensor(m);
  bind_value(m);
  bind_entities(m);
  bind_plan(m);
  bind_comm(m);
  bind_threads(m);
  bind_session(m);
  bind_options(m);
  bind_places(m);
  bind_stores(m);
  bind_engine(m);
  bind_foreign_save(m);
  bind_async(m);
  bind_checkpoint(m);
  bind_access(m);
  bind_unpublished(m);
  bind_convert(m);
  bind_delta(m);
  bind_manager(m);
  bind_fast_tier(m);
  bind_megatron_run(m);
  bind_cli(m);
}
