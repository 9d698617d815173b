// Chooses the file from which a rank reads a chunk that is stored in several files. Pure functions
// of metadata.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/state/metadata.h"

namespace tilestone {

// The rank that wrote a data file.
struct FileWriter {
  static constexpr int kUnknown = -1;
  int rank = kUnknown;
  std::string host;  // "" if unknown
};

// Makes one rank's choices, chunk by chunk. It prefers the rank's own file, then a file written on
// its host, then a file that the rank opens anyway, then the file from which it reads the fewest
// bytes so far. Ties go to the first of the chunk's own item and its copies, in a rotation that
// starts at a place that depends on the rank, so that ranks begin with different files.
class Nearest {
 public:
  // writers: for each entry of Metadata::files. rank: the reader's. host: the reader's, or "" if
  // unknown. same_world: the save had as many ranks as this job; only then, the files written by
  // the rank with this number are the reader's own. metadata and writers must outlive this.
  Nearest(const Metadata& metadata, const std::vector<FileWriter>& writers, int rank,
          bool same_world, std::string_view host);

  // Notes what the rank wants, before its first choice: `items` has for each wanted chunk and
  // object the files in which it is stored. Files that are the only place of an item are opened
  // anyway. Of the others a few that together have all remaining items are: again and again the one
  // with most of these. Has no effect if the number of ranks has changed since the save.
  void expect(std::vector<std::vector<uint32_t>> items);
  // Whether the item is in this rank's own file.
  bool is_own(const ItemLocation& at) const;
  // The copy of the chunk in this rank's own file, as an index into Metadata::copies. kNoCopy if
  // there is none, or if the chunk's own item is in this rank's file.
  uint32_t own_copy(uint32_t tensor, uint32_t chunk) const;
  // Chooses where to read `bytes` of the chunk: an index into Metadata::copies, or kNoCopy for the
  // chunk's own item.
  uint32_t choose(uint32_t tensor, uint32_t chunk, uint64_t bytes);
  // The same for an object: 0 for its own item, i for its i-th copy.
  size_t choose(const StoredObject& object);

 private:
  // Returns the index of the nearest place.
  size_t choose(std::span<const ItemLocation* const> places, uint64_t bytes);
  int nearness(uint32_t file) const;  // 2: the rank's own file; 1: written on its host; else 0
  void keep_nearest(std::vector<uint32_t>& files) const;

  const Metadata& metadata_;
  const std::vector<FileWriter>& writers_;
  const int rank_;
  const bool same_world_;
  const std::string host_;
  std::vector<uint64_t> load_;  // bytes that this rank reads from each file
  std::vector<bool> opened_;    // by file: whether this rank opens it anyway
};

}  // namespace tilestone
