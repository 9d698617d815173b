// The limits of a safetensors header and of an index, of 100 and 256 MiB.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tilestone/base/error.h"
#include "tilestone/base/error_testing.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/safetensors/safetensors.h"

namespace tilestone::safetensors::full_header_test {

TEST(SafetensorsFiles, AFullHeaderBeginsAnotherFileAndAnIndexOverItsLimitIsRefused) {
  const uint64_t half = kMaxHeader / 2;
  const auto two = safetensors_files({{"a", 1, half}, {"b", 1, half}, {"c", 0, 9}}, UINT64_MAX);
  EXPECT_EQ(two.at("a"), "model-00001-of-00002.safetensors");
  EXPECT_EQ(two.at("b"), "model-00002-of-00002.safetensors");
  EXPECT_EQ(two.at("c"), "model-00002-of-00002.safetensors");
  const std::string key(size_t{257} << 20, 'k');
  EXPECT_EQ(error_of([&] { safetensors_files({{key, 1}}, UINT64_MAX); }).code(),
            ErrorCode::kInvalidArgument);
  const std::string longest = key.substr(0, kMaxHeader);
  EXPECT_EQ(error_of([&] { check_safetensors(longest, DType::kUInt8, {1}); }).code(),
            ErrorCode::kInvalidArgument);
}

}  // namespace tilestone::safetensors::full_header_test
