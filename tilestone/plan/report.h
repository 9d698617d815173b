// Rank reports: what a rank has durably written. They are the only source of a checkpoint's
// metadata: whoever holds all of them can check and publish it.
#pragma once

#include <cstdint>
#include <map>
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
  std::string save_id;  // also the nonce of the attempt: each has a new one
  std::string host;     // where the rank ran; "": not known
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
  // Chunks that another file holds too, here or on another rank: same key, same box.
  std::vector<Chunk> copies;
  struct Object {
    std::string key;
    Path path;
    ReportedItem at;
    uint64_t content = 0;  // content_hash of its value, where the save makes copies; 0: not noted
  };
  std::vector<Object> objects;
  // Objects that another rank writes: copies of it where the content is the same.
  std::vector<Object> object_copies;
  // Bytes of a file that belong to no item: how its format begins and ends it.
  struct FilePart {
    uint32_t file = 0;    // index into files
    uint64_t offset = 0;  // bytes
    uint64_t length = 0;  // bytes
    uint32_t crc32 = 0;
  };
  std::vector<FilePart> parts;
  std::map<uint32_t, Attributes> attributes;  // by index into tensors

  // Keys and paths compact, numbers as varints, then optional fields (base/named_fields.h), the
  // XXH3 of all that at the end.
  Bytes encode() const;
  static RankReport decode(ByteView bytes);  // Error(kCorrupt)
};

// Bytes that attributes take in a report. Error(kInvalidArgument) naming the attribute when a value
// is of none of the kinds null, bool, int, float, string, bytes, list, tuple and dict, a dict's key
// is neither text nor int, or values are nested deeper than 16.
uint64_t attribute_bytes(const Attributes& attributes);

// What a merge makes of elements that are there twice.
enum class CopyPolicy : uint8_t {
  kRefuse,    // no report may have copies, and no element may be written twice
  kReported,  // what the reports call copies goes to Metadata::copies; else as kRefuse
  kAccept,    // of chunks with one box the lowest rank's stands; the others, and what the reports
              // call copies, go to Metadata::copies
};

// Checks that the reports are those of one save (all ranks there, one world size and save id), that
// dtypes and shapes agree, that every element of every tensor is written exactly once and no object
// twice, and makes the checkpoint's metadata. Deterministic: the order of the reports doesn't
// matter. Empty chunks are left out, but for one (the lowest rank's) of a tensor without elements.
// Errors name key, box and ranks:
//  kInvalidArgument - reports of several saves, a rank missing or twice, two files of one name, an
//                     item outside its file, a copy where none is accepted or in its original's
//                     file;
//  kMismatch - ranks disagree on a key's dtype, shape or attribute, on tensor versus object, or a
//              copy's payload has another checksum than its chunk's: per-rank data under one key;
//  kCoverage - an element written by nobody or twice, an object written twice, a copy of a box that
//              nobody wrote as a chunk, or of an object that nobody wrote.
Metadata merge_reports(std::vector<RankReport> reports, CopyPolicy copies = CopyPolicy::kRefuse);

}  // namespace tilestone
