// The costs to compare, in bytes that could be read in the same time:
//     apart    = sum over `asked` of (bytes + request_bytes * reads)
//     together = bytes + request_bytes * reads of the merged boxes, + asked bytes / kSendShare
// The cost of a read is what a disk or a file server could stream in the time that it takes to
// start the read. A network is assumed to be kSendShare times as fast as a rank's share of the
// storage.
#include "tilestone/plan/exchange_plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checked.h"
#include "tilestone/geometry/box.h"
#include "tilestone/geometry/coverage.h"

namespace tilestone {
namespace {

constexpr uint64_t kMaxStripe = 8u << 20;       // bytes
constexpr uint64_t kSmallestStripe = 1u << 20;  // bytes
constexpr uint64_t kStripesPerRank = 4;
constexpr uint64_t kSendShare = 4;
constexpr uint64_t kMaxBlockTile = 4u << 20;  // bytes

// The finalizer of SplitMix64: adjacent inputs give unrelated outputs.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The cost of reading.
struct Reading {
  uint64_t bytes = 0;
  uint64_t reads = 0;

  Reading& operator+=(const Reading& other) {
    bytes += other.bytes;
    reads += other.reads;
    return *this;
  }
  uint64_t cost(uint64_t request_bytes) const { return bytes + request_bytes * reads; }
};

// The cost of reading a box of a C-contiguous chunk. Dims are joined, from the innermost outwards,
// as long as their indices are contiguous or close together.
Reading reading_of(const Dims& shape, uint64_t itemsize, const Box& box) {
  Reading reading{itemsize, 1};
  uint64_t step = itemsize;  // bytes between adjacent indices of the dim
  bool joined = true;
  for (size_t d = shape.size(); d-- > 0;) {
    const auto count = static_cast<uint64_t>(box.shape[d]);
    joined = joined && (count == 1 || step <= reading.bytes || step <= kJoinedStep);
    if (joined) {
      reading.bytes += (count - 1) * step;
    } else {
      reading.reads *= count;
    }
    step *= static_cast<uint64_t>(shape[d]);
  }
  reading.bytes *= reading.reads;
  return reading;
}

// The cost of reading the blocks that are set.
Reading reading_of(uint64_t block_bytes, std::span<const char> needed) {
  Reading reading;
  for (size_t b = 0; b < needed.size(); ++b) {
    if (!needed[b]) continue;
    reading.bytes += block_bytes;
    if (b == 0 || !needed[b - 1]) ++reading.reads;
  }
  return reading;
}

// `wanted`: the bytes that are sent.
bool is_better(const Reading& together, const Reading& apart, uint64_t wanted,
               uint64_t request_bytes) {
  if (apart.bytes > together.bytes + together.bytes / kSpareShare) return true;
  return apart.cost(request_bytes) > together.cost(request_bytes) + wanted / kSendShare;
}

Box bounding_box(std::span<const Box> boxes) {
  Box bounds = boxes.front();
  for (const Box& box : boxes) {
    for (size_t d = 0; d < bounds.rank(); ++d) {
      const int64_t end = std::max(bounds.end(d), box.end(d));
      bounds.offset[d] = std::min(bounds.offset[d], box.offset[d]);
      bounds.shape[d] = end - bounds.offset[d];
    }
  }
  return bounds;
}

// `box` without the elements of `others`.
std::vector<Box> rest_of(const Box& box, std::span<const Box> others) {
  std::vector<Box> rest = {box};
  for (const Box& other : others) {
    std::vector<Box> next;
    for (const Box& part : rest) {
      for (Box& left : subtract(part, other)) next.push_back(std::move(left));
    }
    rest = std::move(next);
    if (rest.empty()) break;
  }
  return rest;
}

}  // namespace

StripeOwners::StripeOwners(const Metadata& metadata, int world, std::vector<int> file_owners)
    : file_owners_(std::move(file_owners)),
      ends_(metadata.files.size(), 0),
      world_(static_cast<uint64_t>(world)) {
  uint64_t total = 0;
  for (const StoredTensor& tensor : metadata.tensors) {
    for (const StoredChunk& chunk : tensor.chunks) {
      const uint64_t end =
          try_add(chunk.at.offset, chunk.at.length).value_or(std::numeric_limits<uint64_t>::max());
      ends_[chunk.at.file] = std::max(ends_[chunk.at.file], end);
    }
  }
  for (const uint64_t end : ends_) total = try_add(total, end).value_or(total);
  stripe_bytes_ = std::clamp(total / (world_ * kStripesPerRank), kSmallestStripe, kMaxStripe);
  uint64_t stripes = 0;
  for (const uint64_t end : ends_) {
    firsts_.push_back(stripes);
    stripes += end / stripe_bytes_ + 1;
  }
}

int StripeOwners::owner(uint32_t file, uint64_t offset) const {
  if (!file_owners_.empty() && file_owners_[file] >= 0) return file_owners_[file];
  const uint64_t stripe = firsts_[file] + offset / stripe_bytes_;
  return static_cast<int>((stripe % world_ + mix(stripe / world_) % world_) % world_);
}

void for_each_tile(const Dims& shape, uint64_t itemsize, uint64_t max_bytes, const Box& box,
                   const std::function<void(const Tile&)>& visit) {
  if (box.empty()) return;
  checked_mul(static_cast<uint64_t>(numel(shape)), itemsize, "bytes of a chunk");
  if (shape.empty()) return visit({box, 0});
  std::vector<uint64_t> steps(shape.size(), itemsize);  // bytes between adjacent indices of a dim
  for (size_t d = shape.size() - 1; d-- > 0;) {
    steps[d] = steps[d + 1] * static_cast<uint64_t>(shape[d + 1]);
  }
  size_t cut = 0;  // this dim is cut into groups of indices, dims before it into single indices
  while (steps[cut] > max_bytes && cut + 1 < shape.size()) ++cut;
  const auto group = static_cast<int64_t>(std::min<uint64_t>(
      std::max<uint64_t>(max_bytes / steps[cut], 1), static_cast<uint64_t>(shape[cut])));

  Tile tile{Box::whole(shape), 0};
  for (size_t d = 0; d <= cut; ++d) {
    tile.box.offset[d] = box.offset[d];
    tile.box.shape[d] = 1;
  }
  int64_t& at = tile.box.offset[cut];
  at = at / group * group;
  const int64_t first = at;
  while (true) {
    tile.box.shape[cut] = std::min(group, shape[cut] - at);
    tile.offset = 0;
    for (size_t d = 0; d <= cut; ++d) {
      tile.offset += static_cast<uint64_t>(tile.box.offset[d]) * steps[d];
    }
    visit(tile);
    at += group;
    if (at < box.end(cut)) continue;
    at = first;
    size_t d = cut;
    while (d > 0 && ++tile.box.offset[d - 1] == box.end(d - 1)) {
      tile.box.offset[d - 1] = box.offset[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

uint64_t tile_bytes(const ChunkBlocks& blocks, uint64_t stripe_bytes) {
  const uint64_t most = std::min(stripe_bytes, kMaxBlockTile);
  return std::max<uint64_t>(most / blocks.block_bytes, 1) * blocks.block_bytes;
}

void for_each_block_tile(const ChunkBlocks& blocks, uint64_t tile_bytes, const Box& box,
                         const std::function<void(uint64_t tile, const Box& part)>& visit) {
  uint64_t next = 0;  // the first tile that was not visited
  for_each_run(blocks, box, tile_bytes, [&](const ChunkRun& run) {
    const uint64_t last = (run.offset + run.size - 1) / tile_bytes;
    for (next = std::max(next, run.offset / tile_bytes); next <= last; ++next) {
      const uint64_t begin = next * tile_bytes;
      const uint64_t end = std::min(begin + tile_bytes, blocks.bytes);
      const FlatRange range{static_cast<int64_t>(begin / blocks.itemsize),
                            static_cast<int64_t>(end / blocks.itemsize)};
      for (const Box& part : flat_range_to_boxes(blocks.shape, range)) {
        if (const auto common = intersect(part, box)) visit(next, *common);
      }
    }
  });
}

std::vector<Box> merged_boxes(std::span<const Box> boxes) {
  if (boxes.empty()) return {};
  const Box bounds = bounding_box(boxes);
  if (!find_uncovered(bounds, boxes)) return {bounds};
  std::vector<Box> distinct(boxes.begin(), boxes.end());
  std::sort(distinct.begin(), distinct.end(), [](const Box& a, const Box& b) {
    return a.numel() != b.numel() ? a.numel() > b.numel() : a < b;
  });
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  std::vector<Box> merged;
  for (size_t i = 0; i < distinct.size(); ++i) {
    for (Box& rest : rest_of(distinct[i], std::span(distinct).first(i))) {
      merged.push_back(std::move(rest));
    }
  }
  return merged;
}

bool worth_exchanging(const Dims& shape, uint64_t itemsize, std::span<const Box> asked,
                      uint64_t request_bytes) {
  Reading apart, together;
  uint64_t wanted = 0;
  for (const Box& box : asked) {
    apart += reading_of(shape, itemsize, box);
    wanted += static_cast<uint64_t>(box.numel()) * itemsize;
  }
  if (asked.size() == 1) return false;
  for (const Box& box : merged_boxes(asked)) together += reading_of(shape, itemsize, box);
  return is_better(together, apart, wanted, request_bytes);
}

bool worth_exchanging_blocks(uint64_t block_bytes, std::span<const std::vector<char>> asked,
                             uint64_t wanted, uint64_t request_bytes) {
  Reading apart, together;
  std::vector<char> all;
  size_t ranks = 0;
  for (const std::vector<char>& needed : asked) {
    const Reading one = reading_of(block_bytes, needed);
    ranks += one.reads > 0 ? 1 : 0;
    apart += one;
    all.resize(std::max(all.size(), needed.size()), 0);
    for (size_t b = 0; b < needed.size(); ++b) all[b] |= needed[b];
  }
  together = reading_of(block_bytes, all);
  return ranks > 1 && is_better(together, apart, wanted, request_bytes);
}

}  // namespace tilestone
