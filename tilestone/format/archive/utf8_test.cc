#include <gtest/gtest.h>

#include <string>

#include "tilestone/format/archive/utf8_internal.h"

namespace tilestone::archive::utf8_test {

TEST(Utf8, EveryPairOfBytesIsValidOrNotWhereverItStands) {
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      const bool one_each = a < 0x80 && b < 0x80;
      const bool together = a >= 0xc2 && a < 0xe0 && b >= 0x80 && b < 0xc0;
      for (size_t at = 0; at < 9; ++at) {
        std::string text(18, 'x');
        text[at] = static_cast<char>(a);
        text[at + 1] = static_cast<char>(b);
        EXPECT_EQ(is_utf8(text), one_each || together) << a << ", " << b << " at " << at;
        EXPECT_EQ(is_utf8(text.substr(0, at + 2)), one_each || together) << a << ", " << b;
      }
    }
  }
}

TEST(Utf8, LongerCharactersAndWhatEndsInOneAreToldApart) {
  const std::string narrow = "\xc3\xa4\xc3\xb6\xc3\xbc\xc3\x9f";
  for (size_t before = 0; before < 9; ++before) {
    const std::string start = std::string(before, 'x') + narrow;
    EXPECT_TRUE(is_utf8(start + "\xe2\x82\xac" + narrow));
    EXPECT_TRUE(is_utf8(start + "\xf0\x9f\x98\x80" + narrow));
    EXPECT_TRUE(is_utf8(start + "\xed\xa0\x80" + narrow));  // a surrogate
    EXPECT_FALSE(is_utf8(start + "\xe0\x82\xac"));          // overlong
    EXPECT_FALSE(is_utf8(start + "\xf4\x90\x80\x80"));      // beyond U+10FFFF
    EXPECT_FALSE(is_utf8(start + "\xe2\x82"));
    EXPECT_FALSE(is_utf8(start + "\xc3"));
  }
}

}  // namespace tilestone::archive::utf8_test
