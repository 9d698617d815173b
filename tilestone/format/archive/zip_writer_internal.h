// Writes zip archives of stored records.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone::archive {

// Adds records one after the other. take() returns the bytes to write next; the data of a record
// that begin() has added is written by the caller, after the bytes that end with its header.
class ZipWriter {
 public:
  static constexpr uint64_t kAlignment = 64;  // of every record's data, from the archive's start

  // The record with its data.
  void add(std::string name, ByteView data);
  // The header of a record. `crc32`: of its data; nullopt: end() adds it after the data.
  void begin(std::string name, uint64_t size, std::optional<uint32_t> crc32 = std::nullopt);
  void end(uint32_t crc32);
  // The directory. Returns where in the bytes to write next the last record's checksum is.
  uint64_t finish();
  Bytes take();

 private:
  struct Record {
    std::string name;
    uint64_t header_offset = 0;
    uint64_t size = 0;
    uint32_t crc32 = 0;
    bool deferred = false;  // a descriptor with checksum and sizes follows the data
  };
  uint64_t position() const { return before_ + bytes_.size(); }

  Bytes bytes_;
  uint64_t before_ = 0;  // the number of bytes before these
  std::vector<Record> records_;
};

}  // namespace tilestone::archive
