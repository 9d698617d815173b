// Reads the structure of one zip archive of stored records, from all of its bytes or from some
// parts of it. The order and the names of the records are not assumed. Ambiguous archives are
// refused: two records with one name, overlapping records, a local header that contradicts the
// central directory, extra bytes after the directory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone::archive {

// The available byte ranges of an item. Borrows the bytes.
class ItemBytes {
 public:
  struct Range {
    uint64_t offset = 0;  // from the item's start, bytes
    ByteView bytes;
  };
  explicit ItemBytes(ByteView whole) : length_(whole.size()), ranges_{{0, whole}} {}
  ItemBytes(uint64_t length, std::vector<Range> ranges)
      : length_(length), ranges_(std::move(ranges)) {}

  uint64_t length() const { return length_; }  // of the whole item, bytes
  // nullopt: no range contains these bytes. offset + size must be inside the item.
  std::optional<ByteView> find(uint64_t offset, uint64_t size) const;

 private:
  uint64_t length_;
  std::vector<Range> ranges_;
};

struct ZipRecord {
  std::string_view name;       // with its top folder; borrowed
  uint64_t header_offset = 0;  // from the item's start, bytes
  uint64_t size = 0;           // bytes
  uint32_t crc32 = 0;          // from the directory
  uint16_t flags = 0;
};

class ZipDirectory {
 public:
  // Borrows the bytes. nullopt if the directory is not in the available ranges. Throws
  // Error(kCorrupt, kUnsupported) with the offset.
  static std::optional<ZipDirectory> parse(const ItemBytes& item);

  const std::vector<ZipRecord>& records() const { return records_; }  // by header_offset
  const ZipRecord* find(std::string_view name) const;
  uint64_t offset() const { return offset_; }  // of the central directory

  // Whether the archive's writer computed checksums. torch has an option not to; then all are 0.
  bool has_checksums() const { return has_checksums_; }

  // The offset of the record's bytes, from its local header. Checks the header against the
  // directory. nullopt if the header is not in the available ranges.
  std::optional<uint64_t> data_offset(const ItemBytes& item, const ZipRecord& record) const;

 private:
  struct End {
    uint64_t count = 0;
    uint64_t size = 0;
    uint64_t offset = 0;
    uint64_t end = 0;  // where the directory must end
  };
  static std::optional<End> read_end(const ItemBytes& item);
  // The zip64 end record, which `locator`, the bytes before the end record, finds.
  static std::optional<End> read_end64(const ItemBytes& item, const End& end, ByteView locator);
  void read_records(ByteView bytes, uint64_t count);
  void check_records();

  std::vector<ZipRecord> records_;
  std::vector<uint32_t> by_name_;  // indices into records_, sorted by name
  uint64_t offset_ = 0;
  bool has_checksums_ = false;
};

}  // namespace tilestone::archive
