#include "tilestone/engine/save.h"

#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save_steps_internal.h"

namespace tilestone {

SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options) {
  return engine::save_in_a_row({location, options, engine::deadline_of(options)},
                               engine::RequestView{&state, &location, &options});
}

}  // namespace tilestone
