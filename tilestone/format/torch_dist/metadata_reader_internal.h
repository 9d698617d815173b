// `.metadata` of every torch version, straight from the pickle's nodes into Metadata.
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/metadata.h"

namespace tilestone::torch_dist {

// One metadata file. Not yet index()ed. Throws Error(kCorrupt, kUnsafe, kUnsupported), naming the
// key where one is concerned.
Metadata parse_metadata(ByteView bytes);

// The metadata files of a rank-local checkpoint, in rank order, as one. Chunks may overlap; of an
// object that several ranks wrote the lowest rank's is kept. Error(kCorrupt) naming the key when
// two ranks disagree on a dtype or shape.
Metadata merge_rank_local(std::vector<Metadata> ranks);

}  // namespace tilestone::torch_dist
