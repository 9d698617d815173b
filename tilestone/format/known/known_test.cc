#include "tilestone/format/known/known.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "tilestone/base/error.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"

namespace tilestone::known_test {

// The detected checkpoint as "format, dialect"; "" if there is none.
std::string found(std::vector<std::string> names, std::string_view metadata_json = "") {
  std::sort(names.begin(), names.end());
  const DetectedFormat detected = detect_format(names, [&](const std::string& name) {
    if (name != "metadata.json") throw std::logic_error(name);
    return to_bytes(metadata_json);
  });
  if (detected.format == nullptr) return "";
  return std::string(detected.format->name()) + ", " + std::string(detected.dialect->name());
}

constexpr std::string_view kTorchDist =
    R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})";

TEST(DetectFormat, MetadataJsonDistinguishesTheDialects) {
  EXPECT_EQ(found({".metadata", "__0_0.distcp"}), "torch_dist, pytorch");
  EXPECT_EQ(found({"__0.metadata", "__0_0.distcp"}), "torch_dist, pytorch");
  EXPECT_EQ(found({".metadata", "common.pt", "metadata.json"}, kTorchDist), "torch_dist, megatron");
  EXPECT_EQ(found({".metadata", "metadata.json"}, kTorchDist), "torch_dist, megatron");
  // The file is damaged, but the checkpoint is Megatron-Core's: its objects are lists, which only
  // its dialect takes apart.
  EXPECT_EQ(found({".metadata", "common.pt", "metadata.json"}, "{\"shar"), "torch_dist, megatron");
}

TEST(DetectFormat, FilesOfOtherProgramsAreNoMegatron) {
  EXPECT_EQ(found({".metadata", "common.pt"}), "torch_dist, pytorch");
  EXPECT_EQ(found({".metadata", "metadata.json"}, "{\"mine\": 1}"), "torch_dist, pytorch");
}

TEST(DetectFormat, AnotherFormatThanTheNamedOneIsNotTaken) {
  EXPECT_EQ(found({".metadata", "metadata.json"}, R"({"sharded_backend": "other"})"), "");
  EXPECT_EQ(found({"metadata.json"}, kTorchDist), "");
  EXPECT_EQ(found({"common.pt", "metadata.json", "w/.zarray"}, R"({"sharded_backend": "zarr"})"),
            "zarr, megatron");
  EXPECT_EQ(found({"metadata.json", "w/.zarray"}, R"({"sharded_backend": "zarr"})"),
            "zarr, pytorch");
  EXPECT_EQ(found({}), "");
}

TEST(KnownFormats, AreFoundByNameOrListed) {
  EXPECT_EQ(dialect_named("megatron")->name(), "megatron");
  try {
    dialect_named("other");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(error.hint().find("pytorch, megatron"), std::string::npos);
  }
}

}  // namespace tilestone::known_test
