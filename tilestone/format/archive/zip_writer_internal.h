// Writes zip archives of stored records.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone::archive {

// Lays records out one after the other. A record's data either goes into the archive's own bytes,
// or, for one record at most and the last, is left to the caller, who knows its checksum later.
class ZipWriter {
 public:
  static constexpr uint64_t kAlignment = 64;  // of every record's data, from the archive's start

  void add(std::string name, ByteView data);
  // Header of the last record, whose `size` bytes of data the caller puts after take_head().
  // Returns where they start.
  uint64_t begin_last(std::string name, uint64_t size);

  // Everything before the last record's data; for an archive without one, see finish().
  Bytes take_head() { return std::move(head_); }
  // Everything after the last record's data: zeros where its checksum goes, at `crc32_at`.
  struct Tail {
    Bytes bytes;
    std::vector<uint64_t> crc32_at;
  };
  Tail tail() const;
  // A whole archive of records that were all add()ed.
  Bytes finish() &&;

 private:
  struct Record {
    std::string name;
    uint64_t header_offset = 0;
    uint64_t size = 0;
    uint32_t crc32 = 0;
    bool deferred = false;  // checksum and sizes follow the data
  };
  uint64_t add_header(Record record);
  // Returns where in `out` the checksum of the last record stands.
  static uint64_t append_directory(Bytes& out, std::span<const Record> records, uint64_t offset);

  Bytes head_;
  std::vector<Record> records_;
  uint64_t end_ = 0;  // of the last record's data
};

}  // namespace tilestone::archive
