// Receipts: what a rank has durably written. They are the only source of a checkpoint's
// metadata. A process that has all of them can check the checkpoint and publish it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/plan/save_plan.h"
#include "tilestone/state/metadata.h"

namespace tilestone {

struct ReceiptFile {
  std::string name;
  uint64_t size = 0;  // bytes
  // How many steps in a row have this file, with this one: 1 if the save wrote it for items that
  // later steps may share. 0: it holds other items.
  uint32_t steps = 0;
};

struct ReceiptItem {
  uint32_t file = 0;    // index into Receipt::files
  uint64_t offset = 0;  // in the file, in bytes
  uint64_t length = 0;  // bytes
  ItemChecksums checksums;
  Hash128 hash = {};  // of a chunk's payload, in a file that steps may share
};

struct Receipt {
  int rank = 0;
  int world_size = 1;
  std::string save_id;  // also the nonce of the attempt: new for each attempt
  std::string host;     // where the rank ran; "" if unknown
  std::vector<ReceiptFile> files;
  struct Tensor {
    std::string key;
    Path path;
    DType dtype = DType::kFloat32;
    Dims global_shape;
    uint32_t order = 0;  // its position among the leaves of the rank's tree
  };
  std::vector<Tensor> tensors;  // tensors that this rank holds completely or wrote a chunk of
  struct Chunk {
    uint32_t tensor = 0;  // index into tensors
    Box box;
    ReceiptItem at;
  };
  std::vector<Chunk> chunks;
  // Chunks that are also in another file, from this rank or another one: same key, same box.
  std::vector<Chunk> copies;
  struct Object {
    std::string key;
    Path path;
    ReceiptItem at;
    uint64_t content = 0;  // content_hash of its value if the save makes copies, else 0
    uint32_t order = 0;    // its position among the leaves of the rank's tree
  };
  std::vector<Object> objects;
  // Objects that another rank writes. They are copies of its objects if the content is the same.
  std::vector<Object> object_copies;
  // Bytes of a file that belong to no item: the format's header and trailer.
  struct FilePart {
    uint32_t file = 0;    // index into files
    uint64_t offset = 0;  // bytes
    uint64_t length = 0;  // bytes
    uint32_t crc32 = 0;
  };
  std::vector<FilePart> parts;
  std::map<uint32_t, Attributes> attributes;  // by index into tensors
  TreeKeys dict_keys;                         // of the dicts in the paths
  // What this rank has of one set of ranks that are declared to have the same (plan/held.h).
  struct Held {
    uint64_t holders = 0;  // hash of the ranks; 0: objects that every rank has
    uint32_t ranks = 0;    // how many ranks
    uint32_t parts = 0;    // how many shards or objects, at least 1
    uint64_t content = 0;  // sum of their hashes: key, dtype, global shape and box, or key
    friend bool operator==(const Held&, const Held&) = default;
  };
  std::vector<Held> held;  // only if the ranks planned by rule
  // By files: a hash of all that this rank holds and of the contents that ranks compare; else 0. It
  // shows whether a rank saves another state under the same token.
  uint64_t state = 0;
  // What the rank has done until it reported, in order; by its own clock.
  struct Step {
    std::string name;    // "planning"
    uint64_t began = 0;  // microseconds since 1970, UTC
    uint64_t microseconds = 0;
    friend bool operator==(const Step&, const Step&) = default;
  };
  std::vector<Step> steps;

  // The encoding: compact keys and paths, numbers as varints, then optional fields
  // (base/named_fields.h), and finally the XXH3 of all that.
  Bytes encode() const;
  static Receipt decode(ByteView bytes);  // throws Error(kCorrupt)
};

// The receipt of a rank that has written in two parts, each into files of its own.
Receipt joined_receipts(Receipt first, Receipt second);

// The number of bytes that the attributes take in a receipt. Throws Error(kInvalidArgument), naming
// the attribute, if a value is not null, bool, int, float, string, bytes, list, tuple or dict, if a
// dict's key is neither text nor int, or if values are nested deeper than 16 levels.
uint64_t attribute_bytes(const Attributes& attributes);

// How a merge treats elements that were written twice. Copies in receipts go to Metadata::copies.
enum class CopyPolicy : uint8_t {
  kNoted,   // no element may be written twice
  kAccept,  // of chunks with the same box, the lowest rank's is used, and the others are copies
};

// Checks the receipts and makes the checkpoint's metadata. The receipts must be from one save,
// those of all its ranks in their order. Dtypes and shapes must agree. Every element of every
// tensor must be written exactly once, and every object at most once. Empty chunks are left out,
// except one (the lowest rank's) for a tensor without elements. Throws, naming key, box and ranks:
//  kInvalidArgument - the receipts are from several saves, or one is missing; two files have the
//      same name, an item is outside its file, or a copy is in the same file as its original;
//  kMismatch - ranks disagree on a key's dtype, shape or attribute, or on whether it is a tensor or
//      an object; the declared holders of shards don't have the same; or a copy's payload has a
//      different checksum than its chunk's: per-rank data under one key;
//  kCoverage - an element was not written or was written twice, an object was written twice, or a
//      copy has no chunk with its box or no object with its key.
Metadata merge_receipts(std::vector<Receipt> receipts, CopyPolicy copies = CopyPolicy::kNoted);

}  // namespace tilestone
