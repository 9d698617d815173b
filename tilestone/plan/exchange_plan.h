// Two-phase reading: which rank reads a byte of a checkpoint for the others, and when that pays.
// Pure functions of metadata and boxes, so that every rank finds the same without asking.
//
// A chunk is cut into tiles, boxes whose elements follow one another in a C-contiguous chunk. The
// files, one after another, are dealt to the ranks in stripes; the owner of a tile is the rank
// whose stripe its first byte lies in. The owner learns what the ranks want of a tile and reads it
// for them, or answers that they must read it themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tilestone/geometry/box.h"
#include "tilestone/state/metadata.h"

namespace tilestone {

// Stripes of the files, dealt to the ranks in turn: every run of `world` stripes gives each rank
// one, and begins with another rank than the run before it, so that what recurs at regular
// distances (one of each layer's tensors) has no owner of its own. Where files have owners, all
// stripes of a file are its owner's.
class StripeOwners {
 public:
  // world >= 1. Looks at every chunk's place once. file_owners: ranks below `world`, by index into
  // Metadata::files; a negative one: the file has none. Empty: no file has one.
  StripeOwners(const Metadata& metadata, int world, std::vector<int> file_owners = {});

  // 1 to 8 MiB, smaller where the checkpoint would not give each rank several.
  uint64_t stripe_bytes() const { return stripe_bytes_; }
  // The rank that owns byte `offset` of Metadata::files[file].
  int owner(uint32_t file, uint64_t offset) const;

 private:
  std::vector<int> file_owners_;
  std::vector<uint64_t> ends_;    // of the files: the end of the last chunk, bytes
  std::vector<uint64_t> firsts_;  // number of each file's first stripe
  uint64_t stripe_bytes_ = 0;
  uint64_t world_ = 1;
};

struct Tile {
  Box box;              // in the chunk's own coordinates
  uint64_t offset = 0;  // of its first element in a C-contiguous chunk, bytes
};

// Calls visit for each tile of a chunk of this shape that shares elements with `box` (inside the
// chunk), in C order. Tiles tile the chunk, whatever box is asked for; each has at most max_bytes
// (at least one element).
void for_each_tile(const Dims& shape, uint64_t itemsize, uint64_t max_bytes, const Box& box,
                   const std::function<void(const Tile&)>& visit);

// Disjoint boxes that hold the same elements as `boxes` (which may overlap, not empty themselves):
// their bounding box alone where they cover it.
std::vector<Box> merged_boxes(std::span<const Box> boxes);

// Whether one rank should read for all what the ranks ask for of a tile: `asked` are their boxes,
// at least one, none of them empty, in a C-contiguous chunk of this shape. True where reading
// apart would read more than a thirty-second more bytes than reading once, or where it would take
// so many short reads that reading once and sending is cheaper. request_bytes: what a further read
// costs, as bytes that could be read in the same time.
bool worth_exchanging(const Dims& shape, uint64_t itemsize, std::span<const Box> asked,
                      uint64_t request_bytes);

}  // namespace tilestone
