#include "tilestone/format/archive/zip_writer_internal.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/format/archive/zip_format_internal.h"

namespace tilestone::archive {
namespace {

using namespace zip;

class LittleEndian {
 public:
  explicit LittleEndian(Bytes& out) : out_(out) {}
  LittleEndian& u16(uint64_t value) { return put(static_cast<uint16_t>(value)); }
  LittleEndian& u32(uint64_t value) { return put(static_cast<uint32_t>(value)); }
  LittleEndian& u64(uint64_t value) { return put(value); }
  LittleEndian& raw(ByteView bytes) {
    out_.insert(out_.end(), bytes.begin(), bytes.end());
    return *this;
  }

 private:
  template <typename T>
  LittleEndian& put(T value) {
    static_assert(std::endian::native == std::endian::little);
    const size_t at = out_.size();
    out_.resize(at + sizeof(T));
    std::memcpy(out_.data() + at, &value, sizeof(T));
    return *this;
  }
  Bytes& out_;
};

bool is_wide(uint64_t value) { return value >= kMax32; }
uint64_t narrow(uint64_t value) { return std::min<uint64_t>(value, kMax32); }

constexpr uint64_t kExtraHeader = 4;
constexpr uint64_t kVersion = 20;
constexpr uint64_t kVersion64 = 45;

// The size of the padding field that aligns `offset`: 0, or at least the field's header.
uint64_t padding_field(uint64_t offset) {
  const uint64_t gap = align_up(offset, ZipWriter::kAlignment) - offset;
  return gap == 0 || gap >= kExtraHeader ? gap : gap + ZipWriter::kAlignment;
}

}  // namespace

void ZipWriter::add(std::string name, ByteView data) {
  begin(std::move(name), data.size(), tilestone::crc32(data));
  before_ -= data.size();
  bytes_.insert(bytes_.end(), data.begin(), data.end());
}

void ZipWriter::begin(std::string name, uint64_t size, std::optional<uint32_t> crc32) {
  // The checksum of empty data is known. torch's own writer does not defer it either.
  Record record{std::move(name), position(), size, crc32.value_or(0), !crc32 && size > 0};
  const uint64_t flags = kFlagUtf8 | (record.deferred ? kFlagDescriptor : 0);
  const bool wide = is_wide(size);
  const uint64_t extra64 = wide ? kExtraHeader + 16 : 0;
  const uint64_t padding =
      padding_field(record.header_offset + kLocalHeaderSize + record.name.size() + extra64);
  const uint64_t shown = wide ? kMax32 : record.deferred ? 0 : size;
  LittleEndian out(bytes_);
  out.u32(kLocalHeader).u16(wide ? kVersion64 : kVersion).u16(flags).u16(kStored).u32(0);
  out.u32(record.crc32).u32(shown).u32(shown);
  out.u16(record.name.size()).u16(extra64 + padding).raw(as_bytes(record.name));
  if (wide) out.u16(kExtra64).u16(16).u64(size).u64(size);
  if (padding > 0) {
    out.u16(kExtraPadding).u16(padding - kExtraHeader);
    bytes_.resize(bytes_.size() + padding - kExtraHeader);
  }
  before_ += size;
  records_.push_back(std::move(record));
}

void ZipWriter::end(uint32_t crc32) {
  Record& record = records_.back();
  if (!record.deferred) return;
  record.crc32 = crc32;
  LittleEndian out(bytes_);
  out.u32(kDescriptor).u32(crc32);
  if (is_wide(record.size)) {
    out.u64(record.size).u64(record.size);
  } else {
    out.u32(record.size).u32(record.size);
  }
}

// Adds the central directory, a zip64 end record if a number needs it, and the end record.
uint64_t ZipWriter::finish() {
  const uint64_t offset = position();
  uint64_t last_crc32_at = 0;
  LittleEndian out(bytes_);
  for (const Record& record : records_) {
    const bool wide = is_wide(record.size);
    const bool far = is_wide(record.header_offset);
    const uint64_t body = (wide ? 16 : 0) + (far ? 8 : 0);
    const uint64_t flags = kFlagUtf8 | (record.deferred ? kFlagDescriptor : 0);
    const uint64_t version = body > 0 ? kVersion64 : kVersion;
    out.u32(kCentralHeader).u16(version).u16(version).u16(flags).u16(kStored).u32(0);
    last_crc32_at = bytes_.size();
    out.u32(record.crc32).u32(narrow(record.size)).u32(narrow(record.size));
    out.u16(record.name.size()).u16(body > 0 ? kExtraHeader + body : 0).u16(0);
    out.u16(0).u16(0).u32(0).u32(narrow(record.header_offset)).raw(as_bytes(record.name));
    if (body > 0) out.u16(kExtra64).u16(body);
    if (wide) out.u64(record.size).u64(record.size);
    if (far) out.u64(record.header_offset);
  }
  const uint64_t end64 = position();
  const uint64_t size = end64 - offset;
  if (is_wide(offset) || is_wide(size) || records_.size() >= kMax16) {
    out.u32(kEnd64).u64(kEnd64Size - 12).u16(kVersion64).u16(kVersion64).u32(0).u32(0);
    out.u64(records_.size()).u64(records_.size()).u64(size).u64(offset);
    out.u32(kLocator64).u32(0).u64(end64).u32(1);
  }
  const uint64_t count = std::min<uint64_t>(records_.size(), kMax16);
  out.u32(kEnd).u16(0).u16(0).u16(count).u16(count).u32(narrow(size)).u32(narrow(offset)).u16(0);
  return last_crc32_at;
}

Bytes ZipWriter::take() {
  before_ += bytes_.size();
  return std::exchange(bytes_, {});
}

}  // namespace tilestone::archive
