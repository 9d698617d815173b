// Plans what verify reads: every byte of every data file once, as items and the gaps between them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/checkpoint/checkpoint.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/payloads_internal.h"

namespace tilestone::engine {

struct VerifyItem {
  // What is checked in addition to the checksum: the structure of a tensor or an object. For the
  // bytes with which a format begins or ends a file (kFilePart): nothing.
  enum class Kind : uint8_t { kTensor, kObject, kFilePart };
  const std::string* key = nullptr;
  const ItemLocation* at = nullptr;
  Kind kind = Kind::kObject;
  ChunkRef chunk;                        // of a tensor: the chunk's own item, or a copy of it
  const StoredObject* object = nullptr;  // the object that `at` is the item or a copy of
};

// Damage, and the item that it belongs to.
struct FoundDamage {
  Damage damage;
  uint32_t item = ~uint32_t{0};  // index into VerifyPlan::items; ~0: none, or more than one
  bool of_file = false;          // the file as a whole: it is missing, or has a wrong size
};

// A range of bytes of a file: a gap, a whole item, or a part of an item that is larger than a
// buffer.
struct VerifyRange {
  static constexpr uint32_t kGap = ~uint32_t{0};
  uint32_t file = 0;     // index into Metadata::files
  uint32_t item = kGap;  // index into VerifyPlan::items
  uint64_t begin = 0;    // in the file
  uint64_t end = 0;
  bool whole = true;    // the range contains the whole item
  bool summed = false;  // included in the checksum of a large item
};

struct VerifyPlan {
  std::vector<VerifyItem> items;
  std::vector<VerifyRange> ranges;        // by file and offset
  std::vector<uint32_t> alone;            // items that are read one by one, into separate memory
  std::map<uint32_t, uint32_t> expected;  // large items: CRC-32 of their summed ranges
  std::vector<FoundDamage> damages;       // found from sizes and locations, without reading
  std::vector<ShortFile> short_files;
  uint64_t files = 0;
  uint64_t bytes = 0;
  uint64_t unchecked = 0;  // large items without a checksum
};

// How verify reports bytes whose read has failed with this error (is_unreadable).
std::string unreadable_problem(const Error& error);

// The locations of all instances of the item: first the one that the index names, then its copies.
std::vector<const ItemLocation*> places_of(const Metadata& metadata, const VerifyItem& item);

// The sizes that the save wrote, by file name. Empty without a manifest.
std::map<std::string, uint64_t> written_sizes(const Opened& opened);
// The beginnings and ends of files, as the manifest lists them.
std::vector<ItemLocation> parts_of_files(const Opened& opened);
// By name: index into Metadata::files.
std::unordered_map<std::string_view, uint32_t> files_by_name(const Metadata& metadata);

// Used instead of a file's size: the file is missing, or (as the caller decided) can't be opened.
inline constexpr int64_t kMissing = -1;
inline constexpr int64_t kRefused = -2;

// `sizes`: file sizes by index into Metadata::files, in bytes, or one of the values above.
// `written`: written_sizes(). `parts`: parts_of_files(). `common`: the object of the common state,
// which is not in the metadata; null: none. The plan points into `parts`, `common` and the
// context's metadata.
VerifyPlan plan_verify(const ReadContext& context, const std::vector<int64_t>& sizes,
                       const std::map<std::string, uint64_t>& written,
                       const std::vector<ItemLocation>& parts, const StoredObject* common);

}  // namespace tilestone::engine
