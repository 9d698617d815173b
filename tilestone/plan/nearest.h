// From where a rank reads a chunk that lies in several files. Pure functions of metadata.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/state/metadata.h"

namespace tilestone {

// Who wrote a data file.
struct FileWriter {
  static constexpr int kUnknown = -1;
  int rank = kUnknown;
  std::string host;  // ""; not known
};

// One rank's choice, chunk after chunk: its own file, else a file that was written on its host,
// else the file of which it reads least so far; ties go to the chunk's own item or its copies in
// turn, beginning at a place that depends on the rank, so that ranks begin at different files.
class Nearest {
 public:
  // writers: of Metadata::files, by index; all of it outlives this. rank: of the reader; its own
  // files are those that the rank of this number wrote, if `same_world`: the save had as many
  // ranks. host: the reader's; "": not known.
  Nearest(const Metadata& metadata, const std::vector<FileWriter>& writers, int rank,
          bool same_world, std::string_view host);

  // Whether the place's file is this rank's own.
  bool is_own(const ItemLocation& at) const;
  // A copy of the chunk in this rank's own file, where the chunk's own item is in another's:
  // index into Metadata::copies; else kNoCopy.
  uint32_t own_copy(uint32_t tensor, uint32_t chunk) const;
  // Where `bytes` of the chunk are read: index into Metadata::copies, or kNoCopy.
  uint32_t choose(uint32_t tensor, uint32_t chunk, uint64_t bytes);
  // The same for an object: 0, its own item; i, the i-th of its copies.
  size_t choose(const StoredObject& object);

 private:
  // Index of the nearest place.
  size_t choose(std::span<const ItemLocation* const> places, uint64_t bytes);

  const Metadata& metadata_;
  const std::vector<FileWriter>& writers_;
  const int rank_;
  const bool same_world_;
  const std::string host_;
  std::vector<uint64_t> load_;  // bytes that this rank reads of each file
};

}  // namespace tilestone
