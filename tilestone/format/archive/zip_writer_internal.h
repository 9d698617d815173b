// Writes zip archives of stored records.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone::archive {

// Writes records one after the other. The data of large records may be left to the caller, and so
// may that of the last record, of which the caller learns the checksum later. All other data goes
// into the archive's bytes.
class ZipWriter {
  friend class ZipStream;

 public:
  static constexpr uint64_t kAlignment = 64;  // of every record's data, from the archive's start

  void add(std::string name, ByteView data);
  // Returns the archive's bytes from where this function last ended up to the data, which the
  // caller writes after them.
  Bytes add_elsewhere(std::string name, ByteView data);
  // Adds the header of the last record. The caller writes its `size` bytes of data after
  // take_head(). Returns the offset of the data.
  uint64_t begin_last(std::string name, uint64_t size);

  // Everything before the last record's data. Only after begin_last(); otherwise see finish().
  Bytes take_head() { return std::move(head_); }
  // Everything after the last record's data. `crc32_at`: offsets in `bytes` at which the caller
  // inserts the CRC-32 of this data. `bytes` has zeros there.
  struct Tail {
    Bytes bytes;
    std::vector<uint64_t> crc32_at;
  };
  Tail tail() const;
  // The rest of the archive, if begin_last() was not called.
  Bytes finish() &&;

 private:
  struct Record {
    std::string name;
    uint64_t header_offset = 0;
    uint64_t size = 0;
    uint32_t crc32 = 0;
    bool deferred = false;  // a descriptor with checksum and sizes follows the data
  };
  uint64_t add_header(Record record);
  // Appends the record's local header, which begins at record.header_offset in the archive.
  static void append_header(Bytes& out, const Record& record);
  // Returns the offset of the last record's checksum in `out`.
  static uint64_t append_directory(Bytes& out, std::span<const Record> records, uint64_t offset);

  Bytes head_;
  std::vector<Record> records_;
  uint64_t elsewhere_ = 0;  // bytes before head_
  uint64_t end_ = 0;        // of the last record's data
};

// Writes an archive of many records whose data the caller streams: begin(), `size` bytes of data,
// end(), and so on; finish(). Each call returns the bytes to write next.
class ZipStream {
 public:
  Bytes begin(std::string name, uint64_t size);
  Bytes end(uint32_t crc32);  // of the data
  Bytes finish() &&;

 private:
  std::vector<ZipWriter::Record> records_;
  uint64_t position_ = 0;  // in the archive, of what is written next
};

}  // namespace tilestone::archive
