#include "tilestone/base/checksum.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <random>

#include "tilestone/base/error.h"

namespace tilestone::checksum_test {

Bytes random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST(Crc32, EqualsThePublishedCheckValue) {
  EXPECT_EQ(crc32(as_bytes("123456789")), 0xcbf43926u);
  EXPECT_EQ(crc32({}), 0u);
}

TEST(Crc32, EqualsZlibAtEverySizeAndAlignment) {
  const Bytes bytes = random_bytes(5000, 1);
  for (size_t size = 0; size < 4900; size += size < 300 ? 1 : 97) {
    const ByteView view = ByteView(bytes).subspan(size % 64, size);
    const auto expected =
        ::crc32(0, reinterpret_cast<const Bytef*>(view.data()), static_cast<uInt>(size));
    EXPECT_EQ(crc32(view), expected) << size;
  }
}

TEST(Crc32, ContinuesFromASeed) {
  const Bytes bytes = random_bytes(1000, 2);
  const ByteView view(bytes);
  for (const size_t cut : {0, 1, 17, 512, 999, 1000}) {
    EXPECT_EQ(crc32(view.subspan(cut), crc32(view.first(cut))), crc32(view)) << cut;
  }
}

TEST(Crc32Combine, EqualsTheCrcOfBothTogether) {
  const Bytes bytes = random_bytes(3000, 3);
  const ByteView view(bytes);
  for (const size_t cut : {0, 1, 100, 2048, 2999, 3000}) {
    const ByteView a = view.first(cut);
    const ByteView b = view.subspan(cut);
    EXPECT_EQ(crc32_combine(crc32(a), crc32(b), b.size()), crc32(view)) << cut;
  }
}

TEST(Crc32Combine, HoldsPast4GiB) {
  // Zeros need little memory: the checksum of 2n zeros follows from the checksum of n zeros.
  const Bytes zeros(1 << 20);
  uint32_t crc = crc32(zeros);
  uint64_t size = zeros.size();
  for (; size < (uint64_t{8} << 30); size *= 2) crc = crc32_combine(crc, crc, size);

  uint32_t stepwise = 0;
  for (uint64_t done = 0; done < size; done += zeros.size()) stepwise = crc32(zeros, stepwise);
  EXPECT_EQ(crc, stepwise);
}

TEST(Crc32Combine, RefusesALengthOf64Bits) {
  EXPECT_THROW(crc32_combine(1, 2, uint64_t{1} << 63), Error);
}

TEST(CopyCrc32, CopiesAndChecksumsAtEverySize) {
  const Bytes source = random_bytes(200000, 4);
  for (const size_t size : {0, 1, 63, 4095, 4096, 4097, 65536, 131073, 200000}) {
    const ByteView view = ByteView(source).first(size);
    Bytes target(size + 1, std::byte{0xaa});
    const uint32_t seed = crc32(as_bytes("header"));
    const uint32_t crc = copy_crc32(MutableByteView(target).first(size), view, seed);
    EXPECT_EQ(crc, crc32(view, seed)) << size;
    EXPECT_TRUE(std::equal(view.begin(), view.end(), target.begin())) << size;
    EXPECT_EQ(target.back(), std::byte{0xaa}) << size;
  }
}

TEST(CopyCrc32, RefusesSizesThatDiffer) {
  Bytes target(3);
  EXPECT_THROW(copy_crc32(target, as_bytes("ab")), Error);
}

TEST(Xxh3, EqualsThePublishedValueOfNothing) {
  EXPECT_EQ(xxh3_64({}), 0x2d06800538d394c2u);
  EXPECT_NE(xxh3_64(as_bytes("a")), xxh3_64(as_bytes("b")));
}

}  // namespace tilestone::checksum_test
