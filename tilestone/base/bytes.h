// Views of raw memory, and the little-endian reader and writer for Tilestone's own messages and
// files (receipts, plans, manifests).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tilestone {

using Bytes = std::vector<std::byte>;          // owned
using ByteView = std::span<const std::byte>;   // borrowed, read-only
using MutableByteView = std::span<std::byte>;  // borrowed, writable

// Bytes that nobody changes, and what keeps them alive. Copies share them.
class SharedBytes {
 public:
  SharedBytes() = default;
  SharedBytes(Bytes bytes);
  // Without an owner the bytes are borrowed.
  SharedBytes(ByteView bytes, std::shared_ptr<const void> owner = nullptr)
      : bytes_(bytes), owner_(std::move(owner)) {}
  operator ByteView() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  const std::shared_ptr<const void>& owner() const { return owner_; }
  friend bool operator==(const SharedBytes& a, const SharedBytes& b) {
    return std::ranges::equal(a.bytes_, b.bytes_);
  }

 private:
  ByteView bytes_;
  std::shared_ptr<const void> owner_;
};

ByteView as_bytes(std::string_view text);
std::string_view as_text(ByteView bytes);
Bytes to_bytes(std::string_view text);

// Appends little-endian values to a buffer that it owns.
class ByteWriter {
 public:
  void u8(uint8_t v);
  void u16(uint16_t v);
  void u32(uint32_t v);
  void u64(uint64_t v);
  void i64(int64_t v) { u64(static_cast<uint64_t>(v)); }
  void f64(double v);
  void varint(uint64_t v);             // LEB128, 1 to 10 bytes
  void string(std::string_view text);  // the length as a varint, then the bytes
  void blob(ByteView bytes);           // the length as a varint, then the bytes
  void raw(ByteView bytes);            // the bytes without a length
  size_t size() const { return out_.size(); }
  const Bytes& bytes() const& { return out_; }
  Bytes&& take() && { return std::move(out_); }
  void reserve(size_t n) { out_.reserve(n); }

 private:
  Bytes out_;
};

// Reads what ByteWriter wrote. The bytes must outlive the reader and the views that it returns.
// Every call checks its bounds and throws Error(kCorrupt), whose message has `what` ("receipt of
// rank 3") and the offset.
class ByteReader {
 public:
  explicit ByteReader(ByteView bytes, std::string what);

  uint8_t u8();
  uint16_t u16();
  uint32_t u32();
  uint64_t u64();
  int64_t i64() { return static_cast<int64_t>(u64()); }
  double f64();
  uint64_t varint() {
    const bool one_byte = offset_ < bytes_.size() && bytes_[offset_] < std::byte{0x80};
    return one_byte ? std::to_integer<uint64_t>(bytes_[offset_++]) : long_varint();
  }
  std::string_view string();    // a view of the bytes
  ByteView blob();              // a view of the bytes
  ByteView raw(uint64_t size);  // a view of the bytes
  // Reads a varint that counts elements of at least `min_element_size` (>= 1) bytes each. Throws if
  // so many elements do not fit in the remaining bytes, so memory can be allocated for the count.
  uint64_t count(uint64_t min_element_size = 1);

  uint64_t offset() const { return offset_; }
  uint64_t remaining() const { return bytes_.size() - offset_; }
  void expect_end();  // throws if bytes are left over
  [[noreturn]] void fail(std::string_view problem) const;

 private:
  uint64_t long_varint();

  ByteView bytes_;
  uint64_t offset_ = 0;
  std::string what_;
};

}  // namespace tilestone
