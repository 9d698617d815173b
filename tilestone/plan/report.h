// Rank reports: what a rank has durably written. They are the only source of a checkpoint's
// metadata: whoever holds all of them can check and publish it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/plan/save_plan.h"
#include "tilestone/state/metadata.h"

namespace tilestone {

struct ReportedFile {
  std::string name;
  uint64_t size = 0;  // bytes
};

struct ReportedItem {
  uint32_t file = 0;    // index into RankReport::files
  uint64_t offset = 0;  // in the file, bytes
  uint64_t length = 0;  // bytes
  ItemChecksums checksums;
};

struct RankReport {
  int rank = 0;
  int world_size = 1;
  std::string save_id;
  std::string host;  // where the rank ran; "": not known
  std::vector<ReportedFile> files;
  struct Tensor {
    std::string key;
    Path path;
    DType dtype = DType::kFloat32;
    Dims global_shape;
  };
  std::vector<Tensor> tensors;  // every tensor that this rank wrote a chunk of or holds whole
  struct Chunk {
    uint32_t tensor = 0;  // index into tensors
    Box box;
    ReportedItem at;
  };
  std::vector<Chunk> chunks;
  struct Object {
    std::string key;
    Path path;
    ReportedItem at;
  };
  std::vector<Object> objects;

  // Keys and paths compact, numbers as varints, then optional fields (base/named_fields.h), the
  // XXH3 of all that at the end.
  Bytes encode() const;
  static RankReport decode(ByteView bytes);  // Error(kCorrupt)
};

// Checks that the reports are those of one save (all ranks there, one world size and save id), that
// dtypes and shapes agree, that every element of every tensor is written exactly once and no object
// twice, and makes the checkpoint's metadata. Deterministic: the order of the reports doesn't
// matter. Empty chunks are left out, but for one (the lowest rank's) of a tensor without elements.
// Errors name key, box and ranks:
//  kInvalidArgument - reports of several saves, a rank missing or twice, two files of one name, an
//                     item outside its file;
//  kMismatch - ranks disagree on a key's dtype or shape, or on tensor versus object;
//  kCoverage - an element written by nobody or twice, an object written twice.
Metadata merge_reports(std::vector<RankReport> reports);

}  // namespace tilestone
