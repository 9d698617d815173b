// What verify reads: every byte of every data file once, as items and the gaps between them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tilestone/engine/checkpoint.h"
#include "tilestone/engine/read/payloads_internal.h"

namespace tilestone::engine {

struct VerifyItem {
  // What is checked beside the bytes' checksum: a tensor's or an object's structure; nothing of
  // how a format begins and ends a file.
  enum class Kind : uint8_t { kTensor, kObject, kFilePart };
  const std::string* key = nullptr;
  const ItemLocation* at = nullptr;
  Kind kind = Kind::kObject;
  ChunkRef chunk;                        // of a tensor; the chunk's own item, or a copy of it
  const StoredObject* object = nullptr;  // whose item it is, or a copy of it
};

// Damage, and of which item: ~0, of none, or of more than one.
struct FoundDamage {
  Damage damage;
  uint32_t item = ~uint32_t{0};  // index into VerifyPlan::items
  bool of_file = false;          // of the file as a whole: it is missing, or of another size
};

// A stretch of a file: a gap, a whole item, or a piece of an item that is larger than a buffer.
struct VerifyPiece {
  static constexpr uint32_t kGap = ~uint32_t{0};
  uint32_t file = 0;     // index into Metadata::files
  uint32_t item = kGap;  // index into VerifyPlan::items
  uint64_t begin = 0;    // in the file
  uint64_t end = 0;
  bool whole = true;    // the item is all here
  bool summed = false;  // counts for the checksum of a large item
};

struct VerifyPlan {
  std::vector<VerifyItem> items;
  std::vector<VerifyPiece> pieces;        // by place
  std::vector<uint32_t> alone;            // items that are read into memory of their own
  std::map<uint32_t, uint32_t> expected;  // large items: the checksum of their summed pieces
  std::vector<FoundDamage> damages;       // seen in sizes and places alone
  uint64_t files = 0;
  uint64_t bytes = 0;
  uint64_t unchecked = 0;  // large items without a checksum
};

// Where the item's bytes, or others that mean the same, lie: the place that the index names, then
// copies of it.
std::vector<const ItemLocation*> places_of(const Metadata& metadata, const VerifyItem& item);

// In the place of a file's size: it is not there, or (the caller says so) is not to be opened.
inline constexpr int64_t kMissing = -1;
inline constexpr int64_t kRefused = -2;

// `sizes`: of the files, by index into Metadata::files. `written`: sizes that the manifest gives,
// by name. `parts`: of files, likewise. `common`: the object of the common state, which is not
// among the metadata's; null: none. What is given is borrowed.
VerifyPlan plan_verify(const ReadContext& context, const std::vector<int64_t>& sizes,
                       const std::map<std::string, uint64_t>& written,
                       const std::vector<ItemLocation>& parts, const StoredObject* common);

}  // namespace tilestone::engine
