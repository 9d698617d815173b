#include "tilestone/base/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tilestone/base/error_testing.h"

namespace tilestone::bytes_test {

using ::testing::HasSubstr;

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

Bytes bytes_of(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// The message of the Error(kCorrupt) that `read` throws.
template <typename Read>
std::string refusal(const Bytes& bytes, Read read) {
  ByteReader reader(bytes, "the report");
  try {
    read(reader);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    return error.message();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(Bytes, TextGoesToBytesAndBack) {
  EXPECT_EQ(as_text(as_bytes("abc")), "abc");
  EXPECT_EQ(as_text(to_bytes(std::string_view("a\0b", 3))), std::string_view("a\0b", 3));
  EXPECT_TRUE(as_bytes("").empty());
  EXPECT_EQ(as_text({}), "");
}

TEST(ByteWriter, IsLittleEndian) {
  ByteWriter out;
  out.u16(0x0102);
  out.u32(0x03040506);
  out.i64(-2);
  EXPECT_EQ(out.bytes(),
            bytes_of({2, 1, 6, 5, 4, 3, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}));
}

TEST(ByteWriter, VarintsAreLeb128) {
  ByteWriter out;
  for (const uint64_t v : {uint64_t{0}, uint64_t{127}, uint64_t{128}, uint64_t{300}}) out.varint(v);
  EXPECT_EQ(out.bytes(), bytes_of({0, 127, 0x80, 1, 0xac, 2}));
}

TEST(ByteReader, ReadsWhatWasWritten) {
  ByteWriter out;
  out.u8(255);
  out.u16(65535);
  out.u32(1u << 31);
  out.u64(kMax);
  out.i64(std::numeric_limits<int64_t>::min());
  out.f64(-0.0);
  out.string("key\n");
  out.blob(as_bytes("xyz"));
  out.raw(as_bytes("r"));
  const Bytes bytes = std::move(out).take();

  ByteReader in(bytes, "test");
  EXPECT_EQ(in.u8(), 255);
  EXPECT_EQ(in.u16(), 65535);
  EXPECT_EQ(in.u32(), 1u << 31);
  EXPECT_EQ(in.u64(), kMax);
  EXPECT_EQ(in.i64(), std::numeric_limits<int64_t>::min());
  EXPECT_TRUE(std::signbit(in.f64()));
  EXPECT_EQ(in.string(), "key\n");
  EXPECT_EQ(as_text(in.blob()), "xyz");
  EXPECT_EQ(in.remaining(), 1u);
  EXPECT_EQ(as_text(in.raw(1)), "r");
  EXPECT_EQ(in.offset(), bytes.size());
  in.expect_end();
}

TEST(ByteReader, VarintsOfEverySizeComeBack) {
  ByteWriter out;
  std::vector<uint64_t> values = {0, kMax};
  std::mt19937_64 random(7);
  for (int bits = 0; bits < 64; ++bits) values.push_back(random() >> bits);
  for (const uint64_t value : values) out.varint(value);
  ByteReader in(out.bytes(), "test");
  for (const uint64_t value : values) EXPECT_EQ(in.varint(), value);
  in.expect_end();
}

TEST(ByteReader, NamesTheMessageAndTheOffsetOfDamage) {
  const std::string text = refusal(bytes_of({1, 2, 3}), [](ByteReader& in) {
    in.u8();
    in.u32();
  });
  EXPECT_THAT(text, Mentions("the report", "offset 1 of 3", "4 more bytes", "found 2"));
}

TEST(ByteReader, RefusesToReadPastTheEnd) {
  const Bytes none;
  refusal(none, [](ByteReader& in) { in.u8(); });
  refusal(none, [](ByteReader& in) { in.varint(); });
  refusal(none, [](ByteReader& in) { in.raw(kMax); });
  refusal(bytes_of({5, 'a'}), [](ByteReader& in) { in.string(); });
  refusal(bytes_of({1, 2, 3, 4, 5, 6, 7}), [](ByteReader& in) { in.f64(); });
}

TEST(ByteReader, RefusesVarintsPast64BitsAndPaddedOnes) {
  const auto varint = [](ByteReader& in) { in.varint(); };
  const Bytes too_large = bytes_of({255, 255, 255, 255, 255, 255, 255, 255, 255, 2});
  const Bytes too_long = bytes_of({255, 255, 255, 255, 255, 255, 255, 255, 255, 0x81, 0});
  EXPECT_THAT(refusal(too_large, varint), HasSubstr("exceeds 64 bits"));
  EXPECT_THAT(refusal(too_long, varint), HasSubstr("exceeds 64 bits"));
  EXPECT_THAT(refusal(bytes_of({0x80, 0}), varint), HasSubstr("longer than necessary"));
}

TEST(ByteReader, ACountIsCheckedAgainstTheBytesLeft) {
  Bytes bytes = bytes_of({3, 1, 1, 1, 1, 1, 1});
  ByteReader fits(bytes, "test");
  EXPECT_EQ(fits.count(2), 3u);
  bytes.pop_back();
  EXPECT_THAT(refusal(bytes, [](ByteReader& in) { in.count(2); }),
              AllOf(HasSubstr("3 elements of at least 2 bytes"), HasSubstr("5 bytes")));

  ByteWriter huge;
  huge.varint(kMax);
  refusal(huge.bytes(), [](ByteReader& in) { in.count(16); });
}

TEST(ByteReader, RefusesBytesThatAreLeftOver) {
  EXPECT_THAT(refusal(bytes_of({1, 2}),
                      [](ByteReader& in) {
                        in.u8();
                        in.expect_end();
                      }),
              HasSubstr("expected the end, found 1 more bytes"));
}

}  // namespace tilestone::bytes_test
