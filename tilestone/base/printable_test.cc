#include "tilestone/base/printable.h"

#include <gtest/gtest.h>

namespace tilestone::printable_test {

TEST(Printable, ControlAndFormatCharactersAreEscaped) {
  EXPECT_EQ(printable("a\x1b[31m\n\x7f"), "a\\x1b[31m\\n\\x7f");
  EXPECT_EQ(printable("a\u202eb\u200b\u2028\ufeff"), "a\\u202eb\\u200b\\u2028\\ufeff");
  EXPECT_EQ(printable("\u0085\U000e0041"), "\\x85\\U000e0041");
}

TEST(Printable, OtherTextStaysAndBytesThatAreNotUtf8AreEscaped) {
  EXPECT_EQ(printable("w\\x \u00e9 \u6f22 \U0001f600"), "w\\x \u00e9 \u6f22 \U0001f600");
  EXPECT_EQ(printable("\xff"
                      "a\xc3"),
            "\\xffa\\xc3");
  EXPECT_EQ(printable(""), "");
}

}  // namespace tilestone::printable_test
