#include "tilestone/cli/npy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace tilestone::cli::npy_test {

std::string file_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Npy, HeaderIsAlignedAndFollowedByTheElements) {
  const auto path = std::filesystem::path(testing::TempDir()) / "npy_test.npy";
  const float values[] = {1, 2, 3, 4, 5, 6};
  TensorView tensor = TensorView::allocate(DType::kFloat32, {2, 3});
  std::memcpy(tensor.data, values, sizeof values);
  write_npy(path.string(), tensor);
  const std::string text = file_text(path);
  ASSERT_GE(text.size(), sizeof values);
  const size_t head = text.size() - sizeof values;
  EXPECT_EQ(head % 64, 0u);
  EXPECT_EQ(text.substr(1, 5), "NUMPY");
  EXPECT_NE(text.find("'descr': '<f4'"), std::string::npos);
  EXPECT_NE(text.find("'shape': (2, 3, )"), std::string::npos);
  EXPECT_EQ(std::memcmp(text.data() + head, values, sizeof values), 0);
  std::filesystem::remove(path);
}

TEST(Npy, TypesThatNumPyLacksAreRaw) {
  EXPECT_EQ(npy_descr(DType::kBFloat16), "|V2");
  EXPECT_FALSE(npy_has(DType::kBFloat16));
  EXPECT_TRUE(npy_has(DType::kComplex128));
}

TEST(Npy, AFailureNamesThePathAndTheErrno) {
  try {
    write_npy("/nonexistent-folder/x.npy", TensorView::allocate(DType::kInt8, {1}));
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_EQ(error.sys_errno(), ENOENT);
    EXPECT_NE(std::string(error.what()).find("/nonexistent-folder/x.npy"), std::string::npos);
  }
}

}  // namespace tilestone::cli::npy_test
