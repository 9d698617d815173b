#include "tilestone/format/foreign.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace tilestone::foreign_test {

std::string found(const std::vector<std::string>& names, std::string_view metadata_json = "") {
  const auto foreign = find_foreign(names, [&](const std::string& name) {
    if (name != "metadata.json") throw std::logic_error(name);
    return to_bytes(metadata_json);
  });
  return foreign ? foreign->kind + ", " + foreign->mark : "";
}

TEST(Foreign, EachKindIsKnownByItsMark) {
  EXPECT_EQ(found({".metadata", "common.pt", "metadata.json"},
                  R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1})"),
            "a Megatron-Core checkpoint (torch_dist), metadata.json");
  EXPECT_EQ(found({"metadata.json"}, R"({"sharded_backend": 3})"),
            "a Megatron-Core checkpoint (unknown), metadata.json");
  EXPECT_EQ(found({"common.pt", "metadata.json"}, "{\"shard"),
            "a damaged Megatron-Core checkpoint, metadata.json");
  EXPECT_EQ(found({"a/.zarray", "a/0.0"}), "a zarr store, a/.zarray");
  EXPECT_EQ(found({"zarr.json"}), "a zarr store, zarr.json");
  EXPECT_EQ(found({"model-00001-of-00002.safetensors", "model.safetensors.index.json"}),
            "a Hugging Face checkpoint, model.safetensors.index.json");
}

TEST(Foreign, OtherFilesAreNoMarks) {
  EXPECT_EQ(found({}), "");
  EXPECT_EQ(found({".metadata", "__0_0.distcp", "common.pt", "notes.txt"}), "");
  EXPECT_EQ(found({"iter_1/model/.zarray", "iter_1/metadata.json"}), "");
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  for (const std::string& text : {std::string("{}"), std::string("[1]"), std::string("not JSON"),
                                  std::string("\"sharded_backend\""), std::string(), deep}) {
    EXPECT_EQ(found({"metadata.json"}, text), "") << text.substr(0, 20);
  }
}

}  // namespace tilestone::foreign_test
