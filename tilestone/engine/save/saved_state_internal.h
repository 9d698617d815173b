// Whether a state is what a checkpoint holds already.
#pragma once

#include <string>

#include "tilestone/engine/save/request_internal.h"
#include "tilestone/engine/save/save_steps_internal.h"

namespace tilestone::engine {

// Every rank calls. Takes the steps of a save by rounds up to the ranks' receipts, in one pass over
// the state, and writes nothing. The coordinator compares the receipts with the manifest of the
// checkpoint at the location: keys, paths, shapes, dtypes, boxes and checksums. Returns what
// differs first ("w differs"), the same text on every rank; "" if nothing does. A checkpoint
// without a manifest, or whose chunks have other boxes, differs. Throws what a save throws before
// it begins at the location, and what opening a checkpoint throws.
std::string difference_from_saved(const SaveCall& call, const MadeRequest& request);

}  // namespace tilestone::engine
