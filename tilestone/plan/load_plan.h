// Who reads what: exact ranges from wanted boxes and a checkpoint's metadata.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"

namespace tilestone {

// A part of a wanted piece that one stored chunk gives.
struct ChunkRead {
  uint32_t item = 0;    // index into the wanted tensors
  uint32_t piece = 0;   // index into its pieces
  uint32_t tensor = 0;  // index into Metadata::tensors
  uint32_t chunk = 0;   // index into its chunks
  Box box;              // in the global tensor: inside both the piece and the chunk
};

struct LoadPlan {
  std::vector<ChunkRead> reads;  // ordered by file and offset; the boxes of a piece are disjoint
  // Elements of pieces that reach beyond the stored tensor (allow_shape_mismatch): zero-filled.
  struct Fill {
    uint32_t item = 0;
    uint32_t piece = 0;
    Box box;
  };
  std::vector<Fill> fills;
};

struct LoadPlanOptions {
  bool cast = false;  // convert from the stored dtype to the wanted one
  // Files to read from where a chunk is stored more than once (this rank's own), by index.
  std::vector<uint32_t> preferred_files;
};

// Throws, naming the key: kNotFound when it is not in the checkpoint (the hint names similar
// keys), kMismatch on another dtype (without cast) or global shape (without allow_shape_mismatch),
// kCoverage with the missing box when the stored chunks don't hold all wanted elements.
// Stored chunks that overlap are no problem: each element is read once.
LoadPlan plan_load(std::span<const TensorItem> wanted, const Metadata& metadata,
                   const LoadPlanOptions& options = {});

}  // namespace tilestone
