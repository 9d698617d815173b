// Messages that are described once. Each of these functions writes a value to a ByteWriter, or
// reads it from a ByteReader into the value. So a template over the two, which gets a constant
// message with a writer, is the encoding and the decoding:
//
//   void walk(auto& io, auto& file) {
//     both::text(io, file.name);
//     both::varint(io, file.size);
//   }
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"

namespace tilestone::both {

template <typename Io>
inline constexpr bool kReads = std::is_same_v<Io, ByteReader>;

// Numbers; in one byte also bools and enums.
template <typename T>
void u8(ByteWriter& out, T value) {
  out.u8(static_cast<uint8_t>(value));
}
template <typename T>
void u8(ByteReader& in, T& value) {
  value = static_cast<T>(in.u8());
}
inline void u32(ByteWriter& out, uint32_t value) { out.u32(value); }
inline void u32(ByteReader& in, uint32_t& value) { value = in.u32(); }
inline void u64(ByteWriter& out, uint64_t value) { out.u64(value); }
inline void u64(ByteReader& in, uint64_t& value) { value = in.u64(); }
inline void i64(ByteWriter& out, int64_t value) { out.i64(value); }
template <typename T>
void i64(ByteReader& in, T& value) {
  const int64_t found = in.i64();
  if (!std::in_range<T>(found)) in.fail("a number is out of range");
  value = static_cast<T>(found);
}
template <typename T>
void varint(ByteWriter& out, T value) {
  out.varint(static_cast<uint64_t>(value));
}
template <typename T>
void varint(ByteReader& in, T& value) {
  const uint64_t found = in.varint();
  if (!std::in_range<T>(found)) in.fail("a number is out of range");
  value = static_cast<T>(found);
}

// An enum whose last value is `last`. `what`: "an index file has an unknown role".
template <typename T>
void one_of(ByteWriter& out, T value, T /*last*/, std::string_view /*what*/) {
  out.u8(static_cast<uint8_t>(value));
}
template <typename T>
void one_of(ByteReader& in, T& value, T last, std::string_view what) {
  const uint8_t found = in.u8();
  if (found > static_cast<uint8_t>(last)) in.fail(what);
  value = static_cast<T>(found);
}
// Up to 8 bools in one byte, the first of them in bit 0.
template <typename... Bools>
void flags(ByteWriter& out, Bools... bools) {
  unsigned bits = 0, bit = 1;
  ((bits |= bools ? bit : 0, bit *= 2), ...);
  out.u8(static_cast<uint8_t>(bits));
}
template <typename... Bools>
void flags(ByteReader& in, Bools&... bools) {
  const unsigned bits = in.u8();
  unsigned bit = 1;
  ((bools = (bits & bit) != 0, bit *= 2), ...);
  if (bits >= bit) in.fail("unknown flags");
}

// Text and bytes, with their length; `tail`: without it, up to the end of the message.
inline void text(ByteWriter& out, std::string_view text) { out.string(text); }
inline void text(ByteReader& in, std::string& text) { text = in.string(); }
inline void blob(ByteWriter& out, ByteView bytes) { out.blob(bytes); }
inline void blob(ByteReader& in, Bytes& bytes) {
  const ByteView found = in.blob();
  bytes.assign(found.begin(), found.end());
}
inline void tail(ByteWriter& out, ByteView bytes) { out.raw(bytes); }
inline void tail(ByteReader& in, Bytes& bytes) {
  const ByteView found = in.raw(in.remaining());
  bytes.assign(found.begin(), found.end());
}
inline void tail(ByteWriter& out, std::string_view text) { out.raw(as_bytes(text)); }
inline void tail(ByteReader& in, std::string& text) { text = as_text(in.raw(in.remaining())); }

void walk_key(auto& io, auto& key) {
  if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(key)>>) {
    varint(io, key);
  } else {
    text(io, key);
  }
}

// Refuses what was read unless the condition holds. What is written is right.
inline void expect(ByteWriter&, bool, std::string_view) {}
inline void expect(ByteReader& in, bool holds, std::string_view problem) {
  if (!holds) in.fail(problem);
}

// The number of elements, then walk(element) of each. `least`: bytes of the shortest element, >= 1.
template <typename List, typename Walk>
void each(ByteWriter& out, const List& list, uint64_t /*least*/, const Walk& walk) {
  out.varint(list.size());
  for (const auto& element : list) walk(element);
}
template <typename T, typename Walk>
void each(ByteReader& in, std::vector<T>& list, uint64_t least, const Walk& walk) {
  list.resize(in.count(least));
  for (T& element : list) walk(element);
}

// The same of texts, in a vector or a set.
template <typename Texts>
void texts(ByteWriter& out, const Texts& texts) {
  each(out, texts, 1, [&](const std::string& text) { out.string(text); });
}
template <typename Texts>
void texts(ByteReader& in, Texts& texts) {
  for (uint64_t left = in.count(1); left > 0; --left) {
    texts.insert(texts.end(), std::string(in.string()));
  }
}

// The same of a map from texts or numbers: each key, then walk(value). Keys ascend.
template <typename Map, typename Walk>
void table(ByteWriter& out, const Map& map, uint64_t /*least*/, const Walk& walk) {
  out.varint(map.size());
  for (const auto& [key, value] : map) {
    walk_key(out, key);
    walk(value);
  }
}
template <typename Map, typename Walk>
void table(ByteReader& in, Map& map, uint64_t least, const Walk& walk) {
  typename Map::key_type key{};
  for (uint64_t left = in.count(least); left > 0; --left) {
    walk_key(in, key);
    if (!map.empty() && key <= map.rbegin()->first) in.fail("names are not in ascending order");
    walk(map.try_emplace(map.end(), key)->second);
  }
}
void text_map(auto& io, auto& texts) {
  table(io, texts, 2, [&](auto& text) { both::text(io, text); });
}

}  // namespace tilestone::both
