#include "tilestone/format/data_file_name.h"

#include <gtest/gtest.h>

namespace tilestone::data_file_name_test {

TEST(DataFileName, IsTakenApartAsItWasPutTogether) {
  for (const int rank : {0, 1, 16383}) {
    for (const int index : {0, 7}) {
      const std::string name = data_file_name("a-save", rank, index);
      const auto parts = parse_data_file_name(name);
      ASSERT_TRUE(parts) << name;
      EXPECT_EQ(parts->save_id, "a-save");
      EXPECT_EQ(parts->rank, rank);
      EXPECT_EQ(parts->index, index);
      EXPECT_FALSE(parse_data_file_name(name + "x"));
    }
  }
  for (const char* other : {"", "x", ".metadata", "__0_0.distcp.bak", "common.pt", "a/0.1"}) {
    EXPECT_FALSE(parse_data_file_name(other)) << other;
  }
}

}  // namespace tilestone::data_file_name_test
