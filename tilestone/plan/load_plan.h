// Determines what a rank reads: exact ranges from the wanted boxes and a checkpoint's metadata.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"

namespace tilestone {

// The part of a wanted piece that comes from one stored chunk.
struct ChunkRead {
  uint32_t item = 0;    // index into the wanted tensors
  uint32_t piece = 0;   // index into its pieces
  uint32_t tensor = 0;  // index into Metadata::tensors
  uint32_t chunk = 0;   // index into its chunks
  Box box;              // in the global tensor, inside both the piece and the chunk
};

struct LoadPlan {
  std::vector<ChunkRead> reads;  // ordered by file and offset; the boxes of a piece are disjoint
  // The elements of pieces that lie outside the stored tensor (allow_shape_mismatch). They become
  // zero.
  struct Fill {
    uint32_t item = 0;
    uint32_t piece = 0;
    Box box;
  };
  std::vector<Fill> fills;
};

struct LoadPlanOptions {
  bool cast = false;  // convert from the stored dtype to the wanted one
};

// Throws, naming the key:
//  kNotFound - the key is not in the checkpoint; the hint names similar keys;
//  kMismatch - the dtype differs (without cast) or the global shape differs (without
//      allow_shape_mismatch);
//  kUnsupported - with cast, if there is no conversion between the dtypes;
//  kInvalidArgument - a wanted piece lies outside its tensor;
//  kCorrupt - a stored chunk lies outside its tensor;
//  kCoverage - the stored chunks do not contain all wanted elements; names the missing box.
// Stored chunks may overlap: each element is read once. Which instance of a chunk with copies a
// rank reads is chosen afterwards (nearest.h).
LoadPlan plan_load(std::span<const TensorItem> wanted, const Metadata& metadata,
                   const LoadPlanOptions& options = {});

}  // namespace tilestone
