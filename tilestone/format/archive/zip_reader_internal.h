// Reads the structure of one zip archive of stored records, from all of its bytes or from the
// parts of it that are at hand. Order and names of records are not assumed. What is ambiguous
// (two records of one name, overlapping records, a local header that contradicts the central
// directory, bytes that belong to nothing after the directory) is refused.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone::archive {

// Some byte ranges of an item.
class ItemBytes {
 public:
  struct Range {
    uint64_t offset = 0;
    ByteView bytes;
  };
  explicit ItemBytes(ByteView whole) : length_(whole.size()), ranges_{{0, whole}} {}
  ItemBytes(uint64_t length, std::vector<Range> ranges)
      : length_(length), ranges_(std::move(ranges)) {}

  uint64_t length() const { return length_; }  // of the item
  // nullopt: not at hand. offset + size is inside the item.
  std::optional<ByteView> find(uint64_t offset, uint64_t size) const;

 private:
  uint64_t length_;
  std::vector<Range> ranges_;
};

struct ZipRecord {
  std::string_view name;       // with its top folder
  uint64_t header_offset = 0;  // from the item's start, bytes
  uint64_t size = 0;           // bytes
  uint32_t crc32 = 0;          // as the directory says
  uint16_t flags = 0;
};

class ZipDirectory {
 public:
  // Borrows the bytes. nullopt when the directory is not at hand. Throws Error(kCorrupt,
  // kUnsupported) with the offset.
  static std::optional<ZipDirectory> parse(const ItemBytes& item);

  const std::vector<ZipRecord>& records() const { return records_; }  // by header_offset
  const ZipRecord* find(std::string_view name) const;
  uint64_t offset() const { return offset_; }  // of the central directory

  // True when the archive's writer computed checksums (an option of torch turns them off: all are 0
  // then).
  bool has_checksums() const { return has_checksums_; }

  // Where the record's bytes start, from its local header, which is checked against the
  // directory; nullopt when the header is not at hand.
  std::optional<uint64_t> data_offset(const ItemBytes& item, const ZipRecord& record) const;

 private:
  struct End {
    uint64_t count = 0;
    uint64_t size = 0;
    uint64_t offset = 0;
    uint64_t end = 0;  // where the directory must end
  };
  static std::optional<End> read_end(const ItemBytes& item);
  void read_records(ByteView bytes, uint64_t count);
  void check_records();

  std::vector<ZipRecord> records_;
  std::vector<uint32_t> by_name_;  // indices into records_, sorted by name
  uint64_t offset_ = 0;
  bool has_checksums_ = false;
};

}  // namespace tilestone::archive
