#include "tilestone/engine/delta/encoding_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/zstd_internal.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kComparedBlock = 32 << 10;  // bytes of each side that are passed at once
constexpr uint64_t kSampleElements = 1 << 15;  // by which the compression is judged
constexpr double kWorthwhile = 0.8;            // of the bytes: more is stored as it is

[[noreturn]] void fail_piece(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "delta: " + problem);
}

// Calls `with` with the size of an element as a constant, of which the compiler makes moves.
template <typename With>
void for_itemsize(uint64_t itemsize, const With& with) {
  switch (itemsize) {
    case 1:
      return with(std::integral_constant<size_t, 1>());
    case 2:
      return with(std::integral_constant<size_t, 2>());
    case 4:
      return with(std::integral_constant<size_t, 4>());
    case 8:
      return with(std::integral_constant<size_t, 8>());
    case 16:
      return with(std::integral_constant<size_t, 16>());
    default:
      throw Error(ErrorCode::kInternal, fmt::format("elements of {} bytes", itemsize));
  }
}

// Whether two elements differ.
template <size_t kItem>
bool differ(const std::byte* a, const std::byte* b) {
  if constexpr (kItem == 16) {
    uint64_t first[2], second[2];
    std::memcpy(first, a, kItem);
    std::memcpy(second, b, kItem);
    return ((first[0] ^ second[0]) | (first[1] ^ second[1])) != 0;
  } else {
    using Wide = std::conditional_t<kItem == 4, uint32_t, uint64_t>;
    using Narrow = std::conditional_t<kItem == 1, uint8_t, uint16_t>;
    std::conditional_t<kItem <= 2, Narrow, Wide> first, second;
    std::memcpy(&first, a, kItem);
    std::memcpy(&second, b, kItem);
    return first != second;
  }
}

// What has changed, in order.
struct Changes {
  std::vector<uint32_t> indices;  // of elements
  Bytes values;                   // the new ones
};

// Stops soon once there are more than `most`. Has no branches that depend on the elements: they
// would be mispredicted.
template <size_t kItem>
Changes changes_of(ByteView base, ByteView now, uint64_t most, const PassedBlock& passed) {
  constexpr uint64_t kGroup = 16;                        // bytes that are compared at once
  std::array<uint32_t, kComparedBlock / kGroup> groups;  // those of a block that differ
  Changes found;
  size_t count = 0, room = 0;
  for (uint64_t begin = 0; begin < now.size(); begin += kComparedBlock) {
    const uint64_t size = std::min(kComparedBlock, now.size() - begin);
    const std::byte* const a = base.data() + begin;
    const std::byte* const b = now.data() + begin;
    if (passed != nullptr) passed({a, size}, {b, size});
    if (count > most) continue;
    size_t listed = 0;
    uint64_t at = 0;
    for (; at + kGroup <= size; at += kGroup) {
      groups[listed] = static_cast<uint32_t>(at);
      listed += differ<kGroup>(a + at, b + at) ? 1 : 0;
    }
    if (at < size) groups[listed++] = static_cast<uint32_t>(at);
    const size_t needed = count + listed * (kGroup / kItem);
    if (needed > room) {
      room = std::max(2 * room, needed);
      found.indices.resize(room);
      found.values.resize(room * kItem);
    }
    for (size_t i = 0; i < listed; ++i) {
      const uint64_t end = std::min(groups[i] + kGroup, size);
      for (at = groups[i]; at < end; at += kItem) {
        found.indices[count] = static_cast<uint32_t>((begin + at) / kItem);
        std::memcpy(&found.values[count * kItem], b + at, kItem);
        count += differ<kItem>(a + at, b + at) ? 1 : 0;
      }
    }
  }
  found.indices.resize(count);
  found.values.resize(count * kItem);
  return found;
}

// A number is how many elements are unchanged before a changed one; the greatest that the bytes
// hold: so many are unchanged, and the next number goes on.
constexpr uint32_t goes_on(uint64_t gap_bytes) { return gap_bytes == 1 ? 0xff : 0xffff; }

template <uint64_t kGapBytes>
Bytes gaps_of(const std::vector<uint32_t>& indices) {
  constexpr uint32_t kGoesOn = goes_on(kGapBytes);
  Bytes out((indices.size() + indices.back() / kGoesOn) * kGapBytes);
  std::byte* to = out.data();
  const auto put = [&](uint32_t number) {
    *to++ = static_cast<std::byte>(number);
    if (kGapBytes == 2) *to++ = static_cast<std::byte>(number >> 8);
  };
  uint32_t next = 0;
  for (const uint32_t index : indices) {
    uint32_t gap = index - next;
    for (; gap >= kGoesOn; gap -= kGoesOn) put(kGoesOn);
    put(gap);
    next = index + 1;
  }
  out.resize(static_cast<size_t>(to - out.data()));
  return out;
}

EncodedPiece sparse_of(Changes changes) {
  EncodedPiece piece;
  piece.kind = DeltaKind::kSparse;
  piece.positions = gaps_of<1>(changes.indices);
  if (piece.positions.size() > 2 * changes.indices.size()) {
    Bytes wide = gaps_of<2>(changes.indices);
    if (wide.size() < piece.positions.size()) {
      piece.gap_bytes = 2;
      piece.positions = std::move(wide);
    }
  }
  piece.values = std::move(changes.values);
  piece.values.shrink_to_fit();  // it may be held for long
  return piece;
}

// The XOR of both, first the first bytes of all elements, then their second bytes, and so on: where
// only low bits have changed, most of these planes are zeros.
template <size_t kItem>
Bytes planes_of(ByteView base, ByteView now) {
  const size_t count = now.size() / kItem;
  Bytes out(now.size());
  for (size_t plane = 0; plane < kItem; ++plane) {
    const std::byte* const a = base.data() + plane;
    const std::byte* const b = now.data() + plane;
    std::byte* const to = out.data() + plane * count;
    for (size_t i = 0; i < count; ++i) to[i] = a[i * kItem] ^ b[i * kItem];
  }
  return out;
}

template <size_t kItem>
void apply_planes(ByteView planes, MutableByteView elements) {
  const size_t count = elements.size() / kItem;
  for (size_t plane = 0; plane < kItem; ++plane) {
    const std::byte* const from = planes.data() + plane * count;
    std::byte* const to = elements.data() + plane;
    for (size_t i = 0; i < count; ++i) to[i * kItem] ^= from[i];
  }
}

Bytes compressed_xor(ByteView base, ByteView now, uint64_t itemsize) {
  Bytes made;
  for_itemsize(itemsize,
               [&](auto item) { made = archive::zstd_compress(planes_of<item()>(base, now)); });
  return made;
}

bool is_worthwhile(uint64_t bytes, uint64_t of) {
  return static_cast<double>(bytes) < kWorthwhile * static_cast<double>(of);
}

// Calls `place` with the index of each changed element, in order, and where its value begins.
template <typename Place>
void for_each_change(uint64_t gap_bytes, ByteView positions, ByteView values, uint64_t elements,
                     uint64_t itemsize, const Place& place) {
  if (positions.size() % gap_bytes != 0) fail_piece("its positions end inside one");
  uint64_t index = 0, value = 0;
  for (uint64_t at = 0; at < positions.size(); at += gap_bytes) {
    auto number = std::to_integer<uint32_t>(positions[at]);
    if (gap_bytes == 2) number |= std::to_integer<uint32_t>(positions[at + 1]) << 8;
    index += number;
    if (number == goes_on(gap_bytes)) continue;
    if (index >= elements || values.size() - value < itemsize) {
      fail_piece("a position is beyond the elements or the values");
    }
    place(index, value);
    ++index;
    value += itemsize;
  }
  if (value != values.size()) fail_piece("there are more values than positions");
}

}  // namespace

std::vector<Box> pieces_of(const Box& box, uint64_t itemsize) {
  if (box.empty()) return {};
  const auto most = static_cast<int64_t>(kPieceBytes / itemsize);
  int64_t row = 1;  // elements; a piece begins with whole ones
  for (size_t d = box.rank(); d > 0 && row * box.shape[d - 1] <= most; --d) row *= box.shape[d - 1];
  const int64_t step = most / row * row;
  std::vector<Box> pieces;
  for (int64_t at = 0; at < box.numel(); at += step) {
    const FlatRange range{at, std::min(at + step, box.numel())};
    for (Box& piece : flat_range_to_boxes(box.shape, range)) {
      for (size_t d = 0; d < box.rank(); ++d) piece.offset[d] += box.offset[d];
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

std::optional<EncodedPiece> encode_piece(ByteView base, ByteView now, uint64_t itemsize,
                                         const PassedBlock& passed) {
  const uint64_t most = now.size() / 2 / (itemsize + 1);  // more are no smaller than an XOR
  Changes changes;
  for_itemsize(itemsize, [&](auto item) { changes = changes_of<item()>(base, now, most, passed); });
  const size_t changed = changes.indices.size();
  if (changed == 0) return std::nullopt;
  std::optional<EncodedPiece> sparse;
  if (changed <= most) {
    sparse = sparse_of(std::move(changes));
    if (sparse->bytes() <= std::max<uint64_t>(now.size() / 8, 64)) return sparse;
  }
  const uint64_t least = sparse ? sparse->bytes() : now.size();
  // From the middle, because padding is at the ends.
  const uint64_t sample = std::min(now.size(), kSampleElements * itemsize);
  const uint64_t begin = (now.size() - sample) / 2 / itemsize * itemsize;
  const Bytes tried =
      compressed_xor(base.subspan(begin, sample), now.subspan(begin, sample), itemsize);
  const bool small_enough = is_worthwhile(tried.size() * (now.size() / sample), least);
  EncodedPiece piece;
  piece.kind = DeltaKind::kXor;
  if (small_enough) piece.values = compressed_xor(base, now, itemsize);
  if (small_enough && is_worthwhile(piece.values.size(), least)) return piece;
  return sparse ? *std::move(sparse) : EncodedPiece{};
}

void apply_piece(DeltaKind kind, uint64_t gap_bytes, ByteView positions, ByteView values,
                 MutableByteView elements, uint64_t itemsize) {
  if (kind == DeltaKind::kSparse) {
    return for_itemsize(itemsize, [&](auto item) {
      for_each_change(gap_bytes, positions, values, elements.size() / item(), item(),
                      [&](uint64_t index, uint64_t value) {
                        std::memcpy(elements.data() + index * item(), values.data() + value,
                                    item());
                      });
    });
  }
  if (kind == DeltaKind::kXor) {
    Bytes planes(elements.size());
    archive::zstd_decompress_into(values, planes);
    return for_itemsize(itemsize, [&](auto item) { apply_planes<item()>(planes, elements); });
  }
  if (values.size() != elements.size()) fail_piece("a box has another number of elements");
  if (!values.empty()) std::memcpy(elements.data(), values.data(), values.size());
}

void check_piece(DeltaKind kind, uint64_t gap_bytes, ByteView positions, ByteView values,
                 uint64_t elements, uint64_t itemsize) {
  if (kind == DeltaKind::kSparse) {
    return for_each_change(gap_bytes, positions, values, elements, itemsize,
                           [](uint64_t, uint64_t) {});
  }
  const uint64_t bytes = elements * itemsize;
  if (kind == DeltaKind::kWhole) {
    if (values.size() != bytes) fail_piece("a box has another number of elements");
  } else if (!archive::zstd_says_size(values, bytes)) {  // several frames, or one without a size
    Bytes planes(bytes);
    archive::zstd_decompress_into(values, planes);
  }
}

}  // namespace tilestone::engine
