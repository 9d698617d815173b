#include "tilestone/format/archive/zip_reader_internal.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/utf8_internal.h"
#include "tilestone/format/archive/zip_format_internal.h"

namespace tilestone::archive {
namespace {

using namespace zip;

[[noreturn]] void fail(ErrorCode code, uint64_t offset, const std::string& problem) {
  throw Error(code, "zip archive: " + problem + " (at byte " + std::to_string(offset) + ")");
}
[[noreturn]] void corrupt(uint64_t offset, const std::string& problem) {
  fail(ErrorCode::kCorrupt, offset, problem);
}

template <typename T>
T load(ByteView bytes, uint64_t at) {
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}
uint16_t load16(ByteView bytes, uint64_t at) { return load<uint16_t>(bytes, at); }
uint32_t load32(ByteView bytes, uint64_t at) { return load<uint32_t>(bytes, at); }
uint64_t load64(ByteView bytes, uint64_t at) { return load<uint64_t>(bytes, at); }

// The body of the extra field `id`; empty if there is none.
ByteView find_extra(ByteView extra, uint16_t id, uint64_t offset) {
  while (!extra.empty()) {
    if (extra.size() < 4 || extra.size() - 4 < load16(extra, 2)) {
      corrupt(offset, "an extra field reaches beyond its header");
    }
    const ByteView body = extra.subspan(4, load16(extra, 2));
    if (load16(extra, 0) == id) return body;
    extra = extra.subspan(4 + body.size());
  }
  return {};
}

// Replaces each 32-bit number that refers to the zip64 field by the field's next 8-byte number.
class Wide {
 public:
  Wide(ByteView field, uint64_t offset) : field_(field), offset_(offset) {}
  uint64_t operator()(uint32_t narrow) {
    if (narrow != kMax32) return narrow;
    if (field_.size() < 8) corrupt(offset_, "a zip64 field is missing or too short");
    const uint64_t value = load64(field_, 0);
    field_ = field_.subspan(8);
    return value;
  }

 private:
  ByteView field_;
  uint64_t offset_;
};

std::string quoted(std::string_view name) { return "\"" + std::string(name.substr(0, 200)) + "\""; }

void check_name(std::string_view name, uint64_t offset) {
  if (name.empty()) corrupt(offset, "a record has no name");
  if (!is_utf8(name)) corrupt(offset, "a record's name is not UTF-8");
  if (name.find('\0') != std::string_view::npos) corrupt(offset, "a record's name contains NUL");
}

// Reads the entry of the central directory at bytes[at]; `offset` is its offset in the item, for
// errors. Returns the entry's size.
uint64_t read_record(ByteView bytes, uint64_t at, uint64_t offset, ZipRecord& record) {
  if (bytes.size() - at < kCentralHeaderSize) corrupt(offset, "the directory ends inside an entry");
  if (load32(bytes, at) != kCentralHeader) corrupt(offset, "expected an entry of the directory");
  const uint64_t name_size = load16(bytes, at + 28);
  const uint64_t extra_size = load16(bytes, at + 30);
  const uint64_t size = kCentralHeaderSize + name_size + extra_size + load16(bytes, at + 32);
  if (bytes.size() - at < size) corrupt(offset, "the directory ends inside an entry");
  record.name = as_text(bytes.subspan(at + kCentralHeaderSize, name_size));
  check_name(record.name, offset);
  record.flags = load16(bytes, at + 8);
  record.crc32 = load32(bytes, at + 16);
  if ((record.flags & kFlagEncrypted) != 0) {
    fail(ErrorCode::kUnsupported, offset, "record " + quoted(record.name) + " is encrypted");
  }
  if (load16(bytes, at + 10) != kStored) {
    fail(ErrorCode::kUnsupported, offset,
         "record " + quoted(record.name) + " is compressed (method " +
             std::to_string(load16(bytes, at + 10)) + "); only stored records are supported");
  }
  Wide wide(
      find_extra(bytes.subspan(at + kCentralHeaderSize + name_size, extra_size), kExtra64, offset),
      offset);
  record.size = wide(load32(bytes, at + 24));
  const uint64_t compressed = wide(load32(bytes, at + 20));
  record.header_offset = wide(load32(bytes, at + 42));
  if (compressed != record.size) {
    corrupt(offset, "record " + quoted(record.name) + " is not compressed but has two sizes");
  }
  if (load16(bytes, at + 34) != 0) corrupt(offset, "a record is on another disk");
  return size;
}

}  // namespace

std::optional<ByteView> ItemBytes::find(uint64_t offset, uint64_t size) const {
  for (const Range& range : ranges_) {
    if (offset >= range.offset && size <= range.bytes.size() &&
        offset - range.offset <= range.bytes.size() - size) {
      return range.bytes.subspan(offset - range.offset, size);
    }
  }
  return std::nullopt;
}

std::optional<ZipDirectory::End> ZipDirectory::read_end(const ItemBytes& item) {
  if (item.length() < kEndSize) corrupt(0, "the item is too short for an archive");
  const uint64_t at = item.length() - kEndSize;
  const auto bytes = item.find(at, kEndSize);
  if (!bytes) return std::nullopt;
  if (load32(*bytes, 0) != kEnd || load16(*bytes, 20) != 0) {
    corrupt(at, "the item does not end with the end record of a zip archive");
  }
  End end{load16(*bytes, 10), load32(*bytes, 12), load32(*bytes, 16), at};
  const bool one_disk = load16(*bytes, 4) == 0 && load16(*bytes, 6) == 0;
  if (!one_disk || load16(*bytes, 8) != end.count) corrupt(at, "the archive spans several disks");
  if (at < kLocator64Size) return end;

  const auto locator = item.find(at - kLocator64Size, kLocator64Size);
  if (!locator) return std::nullopt;
  if (load32(*locator, 0) != kLocator64) {
    if (end.count == kMax16 || end.size == kMax32 || end.offset == kMax32) {
      corrupt(at, "the zip64 end record is missing");
    }
    return end;
  }
  return read_end64(item, end, *locator);
}

std::optional<ZipDirectory::End> ZipDirectory::read_end64(const ItemBytes& item, const End& end,
                                                          ByteView locator) {
  const uint64_t at = end.end;
  const uint64_t at64 = load64(locator, 8);
  if (at < kLocator64Size + kEnd64Size || at64 > at - kLocator64Size - kEnd64Size) {
    corrupt(at - kLocator64Size, "the offset of the zip64 end record is outside the item");
  }
  if (load32(locator, 4) != 0 || load32(locator, 16) > 1) {
    corrupt(at - kLocator64Size, "the archive spans several disks");
  }
  const auto bytes64 = item.find(at64, kEnd64Size);
  if (!bytes64) return std::nullopt;
  if (load32(*bytes64, 0) != kEnd64) corrupt(at64, "expected a zip64 end record");
  if (load64(*bytes64, 4) != kEnd64Size - 12 || at64 + kEnd64Size + kLocator64Size != at) {
    corrupt(at64, "there are extra bytes after the zip64 end record");
  }
  const End end64{load64(*bytes64, 32), load64(*bytes64, 40), load64(*bytes64, 48), at64};
  if (load32(*bytes64, 16) != 0 || load32(*bytes64, 20) != 0 ||
      load64(*bytes64, 24) != end64.count) {
    corrupt(at64, "the archive spans several disks");
  }
  const bool agree = (end.count == kMax16 || end.count == end64.count) &&
                     (end.size == kMax32 || end.size == end64.size) &&
                     (end.offset == kMax32 || end.offset == end64.offset);
  if (!agree) corrupt(at, "the end record and the zip64 end record contradict each other");
  return end64;
}

std::optional<ZipDirectory> ZipDirectory::parse(const ItemBytes& item) {
  const auto end = read_end(item);
  if (!end) return std::nullopt;
  if (end->offset > end->end || end->size != end->end - end->offset) {
    corrupt(end->end, "the directory does not end at its end record");
  }
  if (end->count > end->size / kCentralHeaderSize) {
    corrupt(end->end, "there are more records than the directory has room for");
  }
  const auto bytes = item.find(end->offset, end->size);
  if (!bytes) return std::nullopt;
  ZipDirectory directory;
  directory.offset_ = end->offset;
  directory.read_records(*bytes, end->count);
  directory.check_records();
  return directory;
}

void ZipDirectory::read_records(ByteView bytes, uint64_t count) {
  records_.resize(count);
  uint64_t at = 0;
  for (ZipRecord& record : records_) {
    at += read_record(bytes, at, offset_ + at, record);
    has_checksums_ = has_checksums_ || record.crc32 != 0;
  }
  if (at != bytes.size()) {
    corrupt(offset_ + at, "there are extra bytes after the last directory entry");
  }
}

// Sorts the records. Checks that each record ends before the next one begins, and that no name
// occurs twice.
void ZipDirectory::check_records() {
  std::sort(records_.begin(), records_.end(), [](const ZipRecord& a, const ZipRecord& b) {
    return a.header_offset < b.header_offset;
  });
  for (size_t i = 0; i < records_.size(); ++i) {
    const ZipRecord& record = records_[i];
    const uint64_t limit = i + 1 < records_.size() ? records_[i + 1].header_offset : offset_;
    const uint64_t header = kLocalHeaderSize + record.name.size();
    if (record.header_offset > limit || limit - record.header_offset < header ||
        limit - record.header_offset - header < record.size) {
      corrupt(record.header_offset, "record " + quoted(record.name) + " overlaps what follows it");
    }
  }
  by_name_.resize(records_.size());
  for (uint32_t i = 0; i < by_name_.size(); ++i) by_name_[i] = i;
  std::sort(by_name_.begin(), by_name_.end(),
            [&](uint32_t a, uint32_t b) { return records_[a].name < records_[b].name; });
  for (size_t i = 1; i < by_name_.size(); ++i) {
    const ZipRecord& record = records_[by_name_[i]];
    if (record.name == records_[by_name_[i - 1]].name) {
      corrupt(record.header_offset, "two records are named " + quoted(record.name));
    }
  }
}

const ZipRecord* ZipDirectory::find(std::string_view name) const {
  const auto found = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [&](uint32_t index, std::string_view value) { return records_[index].name < value; });
  if (found == by_name_.end() || records_[*found].name != name) return nullptr;
  return &records_[*found];
}

std::optional<uint64_t> ZipDirectory::data_offset(const ItemBytes& item,
                                                  const ZipRecord& record) const {
  const uint64_t at = record.header_offset;
  const auto header = item.find(at, kLocalHeaderSize);
  if (!header) return std::nullopt;
  if (load32(*header, 0) != kLocalHeader) corrupt(at, "expected the local header of a record");
  const uint64_t name_size = load16(*header, 26);
  const uint64_t extra_size = load16(*header, 28);
  const size_t index = static_cast<size_t>(&record - records_.data());
  const uint64_t limit = index + 1 < records_.size() ? records_[index + 1].header_offset : offset_;
  const uint64_t before_data = kLocalHeaderSize + name_size + extra_size;
  if (limit - at < before_data || limit - at - before_data < record.size) {
    corrupt(at, "record " + quoted(record.name) + " overlaps what follows it");
  }
  const auto rest = item.find(at + kLocalHeaderSize, name_size + extra_size);
  if (!rest) return std::nullopt;
  if (as_text(rest->first(name_size)) != record.name) {
    corrupt(at, "record " + quoted(record.name) + " has another name in its local header");
  }
  const bool deferred = (load16(*header, 6) & kFlagDescriptor) != 0;
  if (deferred != ((record.flags & kFlagDescriptor) != 0) || load16(*header, 8) != kStored) {
    corrupt(at, "the flags or the method of record " + quoted(record.name) +
                    " differ between its local header and the directory");
  }
  Wide wide(find_extra(rest->subspan(name_size), kExtra64, at), at);
  const uint64_t size = wide(load32(*header, 22));
  const uint64_t compressed = wide(load32(*header, 18));
  const uint32_t crc = load32(*header, 14);
  const auto differs = [&](uint64_t local, uint64_t central) {
    return local != central && !(deferred && local == 0);
  };
  if (differs(size, record.size) || differs(compressed, record.size) ||
      differs(crc, record.crc32)) {
    corrupt(at, "the size or the checksum of record " + quoted(record.name) +
                    " differs between its local header and the directory");
  }
  return at + before_data;
}

}  // namespace tilestone::archive
