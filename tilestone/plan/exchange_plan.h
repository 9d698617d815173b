// Two-phase reading: decides which rank reads a byte of a checkpoint for the others, and when that
// is worthwhile. These are pure functions of metadata and boxes, so every rank computes the same
// result without communication.
//
// A chunk is cut into tiles: elements that are contiguous in the C-contiguous chunk. If the chunk
// has blocks (state/chunk_blocks.h), its tiles are runs of whole blocks, so that their owners can
// check them; otherwise they are boxes. The files, one after another, are divided into stripes,
// which are distributed over the ranks. The owner of a tile is the rank that owns the stripe of the
// tile's first byte. The owner learns which parts of a tile the ranks need. It reads the tile for
// them, or answers that they must read it themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tilestone/geometry/box.h"
#include "tilestone/state/chunk_blocks.h"
#include "tilestone/state/metadata.h"

namespace tilestone {

// The thresholds of reading rows together. worth_exchanging() estimates with them what a read
// costs, and engine/read/parts.cc cuts reads by them.
inline constexpr uint64_t kSpareShare = 32;    // 1/32 of the needed bytes may be read in addition
inline constexpr uint64_t kJoinedStep = 4096;  // bytes; rows that start at most a page apart are
                                               // read together: each would cost a page anyway

// Distributes the stripes of the files over the ranks. Every `world` consecutive stripes give each
// rank one stripe. Each such group begins with a different rank than the one before it, so that
// data at regular distances (such as the same tensor of every layer) does not all belong to one
// rank. If a file has an owner, that rank owns all of its stripes.
class StripeOwners {
 public:
  // world >= 1. Looks at every chunk's location once. file_owners: for each entry of
  // Metadata::files a rank below `world`, or a negative number if the file has no owner. Empty: no
  // file has an owner.
  StripeOwners(const Metadata& metadata, int world, std::vector<int> file_owners = {});

  // 1 to 8 MiB. Less than 8 MiB if a rank would otherwise get too few stripes.
  uint64_t stripe_bytes() const { return stripe_bytes_; }
  // The rank that owns byte `offset` of Metadata::files[file].
  int owner(uint32_t file, uint64_t offset) const;

 private:
  std::vector<int> file_owners_;
  std::vector<uint64_t> ends_;    // for each file, the end of its last chunk, in bytes
  std::vector<uint64_t> firsts_;  // for each file, the number of its first stripe
  uint64_t stripe_bytes_ = 0;
  uint64_t world_ = 1;
};

struct Tile {
  Box box;              // in the chunk's own coordinates
  uint64_t offset = 0;  // of its first element in the C-contiguous chunk, in bytes
};

// Calls visit for each tile that shares elements with `box`, in C order. The chunk has this shape,
// and `box` lies inside it. The division into tiles does not depend on `box`. Each tile has at most
// max_bytes, but at least one element.
void for_each_tile(const Dims& shape, uint64_t itemsize, uint64_t max_bytes, const Box& box,
                   const std::function<void(const Tile&)>& visit);

// The size of the tiles of a chunk with blocks, in bytes: whole blocks, at least one, and otherwise
// at most stripe_bytes and at most 4 MiB, because several ranks want a whole tile where their parts
// meet.
uint64_t tile_bytes(const ChunkBlocks& blocks, uint64_t stripe_bytes);

// Calls visit(tile, part) for each tile that shares elements with `box` (of the chunk), and for
// each box that is in both: at most 2 n - 1 in a tile for n dims. The tile's number times
// tile_bytes is its offset in the payload.
void for_each_block_tile(const ChunkBlocks& blocks, uint64_t tile_bytes, const Box& box,
                         const std::function<void(uint64_t tile, const Box& part)>& visit);

// Returns disjoint boxes that contain the same elements as `boxes`, which may overlap but are not
// empty. If `boxes` cover their bounding box, the result is that box alone.
std::vector<Box> merged_boxes(std::span<const Box> boxes);

// Whether one rank should read a tile's data for all ranks. `asked` contains the boxes that the
// ranks need: at least one, none empty, in a C-contiguous chunk of this shape. True if separate
// reads would read over 1/32 more bytes than reading once, or would need so many short reads that
// reading once and sending is cheaper. request_bytes: the cost of one more read, as the number of
// bytes that could be read in the same time.
bool worth_exchanging(const Dims& shape, uint64_t itemsize, std::span<const Box> asked,
                      uint64_t request_bytes);

// The same for a tile of a chunk with blocks, of which whole blocks are read. asked[i]: the blocks
// that rank i needs, as from mark_blocks() but only those of the tile; empty or
// all 0 if the rank needs none. wanted: the bytes that the ranks want in all.
bool worth_exchanging_blocks(uint64_t block_bytes, std::span<const std::vector<char>> asked,
                             uint64_t wanted, uint64_t request_bytes);

}  // namespace tilestone
