// Parses `.metadata` of every torch version into Metadata, directly from the pickle's nodes.
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/metadata.h"

namespace tilestone::torch_dist {

// Parses one metadata file. Metadata::index() has not been called on the result. Throws
// Error(kCorrupt, kUnsafe, kUnsupported), naming the key if there is one.
Metadata parse_metadata(ByteView bytes);

// Merges the metadata files of a rank-local checkpoint, given in rank order. Chunks may overlap. If
// several ranks wrote the same object, the lowest rank's is kept. Error(kCorrupt), naming the key,
// if two ranks disagree on a dtype or shape; Error(kCorrupt) if the files come from different
// saves.
Metadata merge_rank_local(std::vector<Metadata> ranks);

}  // namespace tilestone::torch_dist
