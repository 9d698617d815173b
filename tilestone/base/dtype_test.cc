#include "tilestone/base/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace tilestone::dtype_test {

TEST(DType, NamesAreUniqueAndParseBack) {
  std::set<std::string_view> names;
  for (const DType dtype : all_dtypes()) {
    EXPECT_TRUE(names.insert(to_string(dtype)).second) << to_string(dtype);
    EXPECT_EQ(parse_dtype(to_string(dtype)), dtype);
  }
  EXPECT_EQ(names.size(), 22u);
}

TEST(DType, UnknownNamesParseToNothing) {
  for (const std::string_view name : {"", "float", "Float32", "float32 ", "torch.float32"}) {
    EXPECT_FALSE(parse_dtype(name)) << name;
  }
}

TEST(DType, SizesAreThoseOfTheirNames) {
  for (const DType dtype : all_dtypes()) {
    const std::string name(to_string(dtype));
    uint64_t expected = 1;  // bool and the types that are packed into one byte
    if (name.starts_with("float8_") || name.starts_with("float4_")) {
      expected = 1;
    } else if (const size_t digits = name.find_first_of("0123456789"); digits != name.npos) {
      const auto bits =
          static_cast<uint64_t>(name == "bfloat16" ? 16 : std::stoi(name.substr(digits)));
      expected = bits / 8;
    }
    EXPECT_EQ(itemsize(dtype), expected) << name;
  }
}

TEST(DType, NumbersThatTravelBetweenRanksStay) {
  EXPECT_EQ(static_cast<int>(DType::kBool), 0);
  EXPECT_EQ(static_cast<int>(DType::kBFloat16), 10);
  EXPECT_EQ(static_cast<int>(DType::kFloat4E2M1FNX2), 21);
}

}  // namespace tilestone::dtype_test
