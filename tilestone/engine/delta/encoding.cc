#include "tilestone/engine/delta/encoding_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/zstd_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kScanned = 64;                // bytes that are compared at once
constexpr uint64_t kSampleElements = 1 << 15;  // by which the compression is judged
constexpr double kWorthwhile = 0.95;           // of the bytes: more is stored as it is

[[noreturn]] void fail_piece(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "delta: " + problem);
}

uint64_t word_at(const std::byte* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// The indices of the elements that differ. Stops once there are more than `most`.
class Changes {
 public:
  Changes(ByteView base, ByteView now, uint64_t itemsize, uint64_t most)
      : a_(base.data()), b_(now.data()), item_(itemsize), most_(most) {
    indices_.reserve(std::min<uint64_t>(most, now.size() / kScanned) + kScanned);
    const uint64_t whole = now.size() - now.size() % kScanned;
    for (uint64_t at = 0; at < whole && !too_many(); at += kScanned) {
      if (is_same_block(at)) continue;
      for (uint64_t word = at; word < at + kScanned; word += sizeof(uint64_t)) scan_word(word);
    }
    for (uint64_t at = whole; at < now.size(); at += item_) note_if_changed(at);
  }

  bool too_many() const { return indices_.size() > most_; }
  const std::vector<uint32_t>& indices() const { return indices_; }

 private:
  bool is_same_block(uint64_t at) const {
    uint64_t differing = 0;
    for (uint64_t word = at; word < at + kScanned; word += sizeof(uint64_t)) {
      differing |= word_at(a_ + word) ^ word_at(b_ + word);
    }
    return differing == 0;
  }

  void scan_word(uint64_t at) {
    uint64_t differing = word_at(a_ + at) ^ word_at(b_ + at);
    if (differing == 0) return;
    if (item_ >= sizeof(uint64_t)) {
      const auto index = static_cast<uint32_t>(at / item_);
      if (indices_.empty() || indices_.back() != index) indices_.push_back(index);
      return;
    }
    const auto bits = static_cast<unsigned>(8 * item_);
    const uint64_t mask = (uint64_t{1} << bits) - 1;
    for (uint64_t i = at / item_; differing != 0; ++i, differing >>= bits) {
      if ((differing & mask) != 0) indices_.push_back(static_cast<uint32_t>(i));
    }
  }

  void note_if_changed(uint64_t at) {
    if (std::memcmp(a_ + at, b_ + at, item_) == 0) return;
    indices_.push_back(static_cast<uint32_t>(at / item_));
  }

  const std::byte* const a_;
  const std::byte* const b_;
  const uint64_t item_;
  const uint64_t most_;
  std::vector<uint32_t> indices_;
};

// A number is how many elements are unchanged before a changed one; the greatest that the bytes
// hold: so many are unchanged, and the next number goes on.
template <typename Number>
constexpr uint32_t kGoesOn = static_cast<Number>(~Number{0});

template <typename Number>
uint64_t numbers_of(const std::vector<uint32_t>& indices) {
  uint64_t count = 0;
  uint32_t next = 0;
  for (const uint32_t index : indices) {
    count += 1 + (index - next) / kGoesOn<Number>;
    next = index + 1;
  }
  return count;
}

template <typename Number>
Bytes gaps_of(const std::vector<uint32_t>& indices) {
  Bytes out(numbers_of<Number>(indices) * sizeof(Number));
  std::byte* to = out.data();
  const auto put = [&](uint32_t value) {
    const auto number = static_cast<Number>(value);
    std::memcpy(to, &number, sizeof number);
    to += sizeof number;
  };
  uint32_t next = 0;
  for (const uint32_t index : indices) {
    uint32_t gap = index - next;
    for (; gap >= kGoesOn<Number>; gap -= kGoesOn<Number>) put(kGoesOn<Number>);
    put(gap);
    next = index + 1;
  }
  return out;
}

template <size_t kItem>
void gather(const std::vector<uint32_t>& indices, ByteView now, Bytes& out) {
  std::byte* to = out.data();
  for (const uint32_t index : indices) {
    std::memcpy(to, now.data() + uint64_t{index} * kItem, kItem);
    to += kItem;
  }
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

EncodedPiece sparse_of(const std::vector<uint32_t>& indices, ByteView now, uint64_t itemsize) {
  EncodedPiece piece;
  piece.kind = DeltaKind::kSparse;
  piece.changed = indices.size();
  const bool wide = 2 * numbers_of<uint16_t>(indices) < numbers_of<uint8_t>(indices);
  piece.gap_bytes = wide ? 2 : 1;
  piece.positions = wide ? gaps_of<uint16_t>(indices) : gaps_of<uint8_t>(indices);
  piece.values.resize(indices.size() * itemsize);
  for_itemsize(itemsize, [&](auto item) { gather<item()>(indices, now, piece.values); });
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

template <typename Number>
uint32_t number_at(ByteView positions, uint64_t at) {
  Number number;
  std::memcpy(&number, positions.data() + at, sizeof number);
  return number;
}

// Calls `place` with the index of each changed element, in order, and where its value begins.
template <typename Number, typename Place>
void for_each_change(ByteView positions, ByteView values, uint64_t elements, uint64_t itemsize,
                     const Place& place) {
  if (positions.size() % sizeof(Number) != 0) fail_piece("its positions end inside one");
  uint64_t index = 0, value = 0;
  for (uint64_t at = 0; at < positions.size(); at += sizeof(Number)) {
    const uint32_t number = number_at<Number>(positions, at);
    index += number;
    if (number == kGoesOn<Number>) continue;
    if (index >= elements || values.size() - value < itemsize) {
      fail_piece("a position is beyond the elements or the values");
    }
    place(index, value);
    ++index;
    value += itemsize;
  }
  if (value != values.size()) fail_piece("there are more values than positions");
}

template <typename Place>
void for_each_change(uint64_t gap_bytes, ByteView positions, ByteView values, uint64_t elements,
                     uint64_t itemsize, const Place& place) {
  gap_bytes == 1 ? for_each_change<uint8_t>(positions, values, elements, itemsize, place)
                 : for_each_change<uint16_t>(positions, values, elements, itemsize, place);
}

}  // namespace

std::vector<Box> pieces_of(const Box& box, uint64_t itemsize) {
  if (box.empty()) return {};
  uint64_t row = static_cast<uint64_t>(box.numel()) * itemsize;  // bytes
  size_t dims = 0;  // so many indices are needed to name a row that is small enough
  for (; row > kPieceBytes && dims < box.rank(); ++dims) {
    row /= static_cast<uint64_t>(box.shape[dims]);
  }
  if (dims == 0) return {box};
  const size_t last = dims - 1;
  const auto step = static_cast<int64_t>(std::max<uint64_t>(kPieceBytes / row, 1));
  std::vector<Box> pieces;
  Box piece = box;
  for (size_t d = 0; d < last; ++d) piece.shape[d] = 1;
  while (true) {
    piece.shape[last] = std::min(step, box.end(last) - piece.offset[last]);
    pieces.push_back(piece);
    piece.offset[last] += step;
    for (size_t d = last; piece.offset[d] >= box.end(d); --d) {
      if (d == 0) return pieces;
      piece.offset[d] = box.offset[d];
      ++piece.offset[d - 1];
    }
  }
}

std::optional<EncodedPiece> encode_piece(ByteView base, ByteView now, uint64_t itemsize) {
  const uint64_t most = now.size() / 2 / (itemsize + 1);  // more are no smaller than an XOR
  const Changes changes(base, now, itemsize, most);
  if (changes.indices().empty()) return std::nullopt;
  std::optional<EncodedPiece> sparse;
  if (!changes.too_many()) {
    sparse = sparse_of(changes.indices(), now, itemsize);
    const uint64_t bytes = sparse->positions.size() + sparse->values.size();
    if (bytes <= std::max<uint64_t>(now.size() / 8, 64)) return sparse;
  }
  const uint64_t least = sparse ? sparse->positions.size() + sparse->values.size() : now.size();
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
  if (sparse) return sparse;
  return EncodedPiece{};
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
