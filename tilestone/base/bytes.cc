#include "tilestone/base/bytes.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <utility>

#include "tilestone/base/error.h"

namespace tilestone {
namespace {

static_assert(std::endian::native == std::endian::little,
              "values are copied without byte swaps, so the machine must be little-endian");

template <typename T>
void append(Bytes& out, T value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), begin, begin + sizeof(T));
}

template <typename T>
T load(ByteView bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

}  // namespace

SharedBytes::SharedBytes(Bytes bytes) {
  auto owned = std::make_shared<const Bytes>(std::move(bytes));
  bytes_ = *owned;
  owner_ = std::move(owned);
}

ByteView as_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string_view as_text(ByteView bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Bytes to_bytes(std::string_view text) {
  const ByteView view = as_bytes(text);
  return Bytes(view.begin(), view.end());
}

void ByteWriter::u8(uint8_t v) { append(out_, v); }
void ByteWriter::u16(uint16_t v) { append(out_, v); }
void ByteWriter::u32(uint32_t v) { append(out_, v); }
void ByteWriter::u64(uint64_t v) { append(out_, v); }
void ByteWriter::f64(double v) { append(out_, v); }

void ByteWriter::varint(uint64_t v) {
  while (v >= 0x80) {
    u8(static_cast<uint8_t>(v | 0x80));
    v >>= 7;
  }
  u8(static_cast<uint8_t>(v));
}

void ByteWriter::string(std::string_view text) { blob(as_bytes(text)); }

void ByteWriter::blob(ByteView bytes) {
  varint(bytes.size());
  raw(bytes);
}

void ByteWriter::raw(ByteView bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }

ByteReader::ByteReader(ByteView bytes, std::string what) : bytes_(bytes), what_(std::move(what)) {}

uint8_t ByteReader::u8() { return load<uint8_t>(raw(sizeof(uint8_t))); }
uint16_t ByteReader::u16() { return load<uint16_t>(raw(sizeof(uint16_t))); }
uint32_t ByteReader::u32() { return load<uint32_t>(raw(sizeof(uint32_t))); }
uint64_t ByteReader::u64() { return load<uint64_t>(raw(sizeof(uint64_t))); }
double ByteReader::f64() { return load<double>(raw(sizeof(double))); }

uint64_t ByteReader::long_varint() {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (offset_ == bytes_.size()) fail("expected more bytes of a varint, found the end");
    const auto byte = std::to_integer<uint8_t>(bytes_[offset_++]);
    if (shift == 63 && byte > 1) fail("a varint exceeds 64 bits");
    value |= uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) {
      // Each value has exactly one valid encoding, so that equal messages have equal checksums.
      if (byte == 0 && shift > 0) fail("a varint is longer than necessary");
      return value;
    }
  }
  fail("a varint exceeds 64 bits");
}

std::string_view ByteReader::string() { return as_text(blob()); }

ByteView ByteReader::blob() { return raw(varint()); }

ByteView ByteReader::raw(uint64_t size) {
  if (size > remaining()) {
    fail(fmt::format("expected {} more bytes, found {}", size, remaining()));
  }
  const ByteView view = bytes_.subspan(offset_, size);
  offset_ += size;
  return view;
}

uint64_t ByteReader::count(uint64_t min_element_size) {
  const uint64_t n = varint();
  if (n > remaining() / min_element_size) {
    fail(fmt::format("expected {} elements of at least {} bytes each, but only {} bytes are left",
                     n, min_element_size, remaining()));
  }
  return n;
}

void ByteReader::expect_end() {
  if (remaining() > 0) fail(fmt::format("expected the end, found {} more bytes", remaining()));
}

void ByteReader::fail(std::string_view problem) const {
  throw Error(ErrorCode::kCorrupt, fmt::format("{} is damaged at offset {} of {}: {}", what_,
                                               offset_, bytes_.size(), problem));
}

}  // namespace tilestone
