#include "tilestone/engine/delta/encoding_internal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/delta/box_crc_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::engine::encoding_test {

Bytes random_bytes(size_t size, std::mt19937_64& random) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Changes one bit of about a share of the elements.
Bytes changed(Bytes bytes, uint64_t itemsize, double share, std::mt19937_64& random) {
  std::uniform_real_distribution<double> number(0, 1);
  for (size_t at = 0; at < bytes.size(); at += itemsize) {
    if (number(random) < share) bytes[at + random() % itemsize] ^= std::byte{1};
  }
  return bytes;
}

Bytes applied(const EncodedPiece& piece, const Bytes& base, const Bytes& now, uint64_t itemsize) {
  const ByteView values = piece.kind == DeltaKind::kWhole ? ByteView(now) : ByteView(piece.values);
  Bytes made = base;
  check_piece(piece.kind, piece.gap_bytes, piece.positions, values, base.size() / itemsize,
              itemsize);
  apply_piece(piece.kind, piece.gap_bytes, piece.positions, values, made, itemsize);
  return made;
}

TEST(DeltaEncoding, EveryBitPatternOfEverySizeComesBack) {
  std::mt19937_64 random(1);
  for (const uint64_t itemsize : {1, 2, 4, 8, 16}) {
    for (const size_t count : {1, 3, 32, 33, 1000, 70'000}) {
      const Bytes base = random_bytes(count * itemsize, random);
      Bytes passed;
      const auto pass = [&](ByteView, ByteView now) {
        passed.insert(passed.end(), now.begin(), now.end());
      };
      EXPECT_FALSE(encode_piece(base, base, itemsize, pass));
      EXPECT_TRUE(passed == base);
      for (const double share : {0.00002, 0.01, 0.3, 1.0}) {
        const Bytes now = changed(base, itemsize, share, random);
        const auto piece = encode_piece(base, now, itemsize);
        if (now == base) {
          EXPECT_FALSE(piece);
          continue;
        }
        ASSERT_TRUE(piece) << itemsize << " " << count << " " << share;
        EXPECT_TRUE(applied(*piece, base, now, itemsize) == now) << itemsize << " " << count;
      }
      const Bytes other = random_bytes(count * itemsize, random);
      if (const auto piece = encode_piece(base, other, itemsize)) {
        EXPECT_TRUE(applied(*piece, base, other, itemsize) == other);
        EXPECT_LE(piece->positions.size() + piece->values.size(), other.size());
      }
    }
  }
}

TEST(DeltaEncoding, OnePercentOfTwoBytesTakesLessThanTwoPercent) {
  std::mt19937_64 random(2);
  const Bytes base = random_bytes(kPieceBytes, random);
  const auto piece = encode_piece(base, changed(base, 2, 0.01, random), 2);
  ASSERT_TRUE(piece);
  EXPECT_EQ(piece->kind, DeltaKind::kSparse);
  EXPECT_LT(piece->positions.size() + piece->values.size(), kPieceBytes / 50);
}

TEST(DeltaEncoding, LowBitsOfAllElementsAreAnXorAndOthersAreWhole) {
  std::mt19937_64 random(3);
  const Bytes base = random_bytes(1 << 20, random);
  Bytes low = base;
  for (size_t at = 0; at < low.size(); at += 2) low[at] ^= static_cast<std::byte>(random());
  const auto piece = encode_piece(base, low, 2);
  ASSERT_TRUE(piece);
  EXPECT_EQ(piece->kind, DeltaKind::kXor);
  EXPECT_LT(piece->values.size(), low.size() * 6 / 10);
  EXPECT_EQ(encode_piece(base, random_bytes(1 << 20, random), 2)->kind, DeltaKind::kWhole);
}

TEST(DeltaEncoding, PiecesThatDoNotFitAreCorrupt) {
  Bytes elements(8);
  const Bytes value(2);
  const auto fails = [&](DeltaKind kind, uint64_t gap_bytes, const Bytes& positions,
                         const Bytes& values) {
    EXPECT_THROW(apply_piece(kind, gap_bytes, positions, values, elements, 2), Error);
    EXPECT_THROW(check_piece(kind, gap_bytes, positions, values, 4, 2), Error);
  };
  fails(DeltaKind::kSparse, 1, {std::byte{4}}, value);  // beyond the end
  fails(DeltaKind::kSparse, 1, {std::byte{255}, std::byte{0}}, value);
  fails(DeltaKind::kSparse, 1, {std::byte{0}}, Bytes(4));  // a value without position
  fails(DeltaKind::kSparse, 1, {std::byte{0}}, Bytes(1));
  fails(DeltaKind::kSparse, 2, {std::byte{0}}, value);
  fails(DeltaKind::kWhole, 1, {}, Bytes(6));
  fails(DeltaKind::kXor, 1, {}, Bytes(6));
}

TEST(DeltaEncoding, PiecesAreTheBoxInItsOrder) {
  const Box box{{2, 0, 1}, {3, 700, 1000}};
  const auto pieces = pieces_of(box, 4);
  EXPECT_GT(pieces.size(), 2U);
  int64_t count = 0;
  for (const Box& piece : pieces) {
    EXPECT_TRUE(box.contains(piece));
    EXPECT_LE(static_cast<uint64_t>(piece.numel()) * 4, kPieceBytes);
    const Dims& at = piece.offset;
    EXPECT_EQ(count, ((at[0] - 2) * 700 + at[1]) * 1000 + at[2] - 1);
    count += piece.numel();
  }
  EXPECT_EQ(count, box.numel());
  EXPECT_EQ(pieces_of(Box::whole({}), 4).size(), 1U);
  EXPECT_TRUE(pieces_of(Box::whole({3, 0}), 4).empty());
}

// The CRC-32 of a tensor that is cut into boxes at random.
TEST(DeltaCrc, PortionsOfAnyBoxesMakeTheChecksumOfTheWhole) {
  std::mt19937_64 random(4);
  for (const Dims& shape : {Dims{}, Dims{17}, Dims{6, 7}, Dims{3, 5, 4}, Dims{2, 3, 4, 5}}) {
    const uint64_t item = 2;
    Bytes bytes = random_bytes(static_cast<size_t>(numel(shape)) * item, random);
    const StridedView whole = StridedView::contiguous(bytes.data(), shape, item);
    std::vector<Box> boxes{Box::whole(shape)};
    for (int cut = 0; cut < 6; ++cut) {
      uint32_t portions = 0;
      for (const Box& box : boxes) {
        Bytes part(static_cast<size_t>(box.numel()) * item);
        strided_copy(StridedView::contiguous(part.data(), box.shape, item), whole.narrow(box));
        BoxCrc crc(box, shape, item);
        const size_t half = random() % (part.size() + 1);
        if (!part.empty()) crc.add(ByteView(part).first(half));
        if (!part.empty()) crc.add(ByteView(part).subspan(half));
        portions ^= crc.portion();
        EXPECT_EQ(crc.portion(), crc_portion(part, box, shape, item));
      }
      EXPECT_EQ(crc_of_portions(portions, bytes.size()), crc32(bytes)) << to_string(shape);
      if (shape.empty()) break;
      Box& box = boxes[random() % boxes.size()];
      const size_t dim = random() % shape.size();
      Box rest = box;
      box.shape[dim] /= 2;
      rest.offset[dim] += box.shape[dim];
      rest.shape[dim] -= box.shape[dim];
      boxes.push_back(rest);
    }
  }
  EXPECT_EQ(crc_of_portions(0, 0), 0U);
}

}  // namespace tilestone::engine::encoding_test
