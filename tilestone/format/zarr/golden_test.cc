// Reads every tensor and object of the zarr checkpoints in tests/golden with the format's
// functions.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tilestone/base/checksum.h"
#include "tilestone/format/zarr/zarr.h"
#include "tilestone/format/zarr/zarr_testing.h"

namespace tilestone::zarr::golden_test {

namespace fs = std::filesystem;
using Json = nlohmann::json;

FileImage files_of(const fs::path& folder) {
  FileImage files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(stream)), {});
    files.emplace(fs::relative(entry.path(), folder).generic_string(), to_bytes(text));
  }
  return files;
}

std::vector<fs::path> goldens() {
  std::vector<fs::path> found;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(TILESTONE_GOLDEN_DIR)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_directory() && name.starts_with("zarr-")) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

class ZarrGolden : public testing::TestWithParam<fs::path> {
 protected:
  const FileImage files_ = files_of(GetParam());
  const Json expected_ = Json::parse(std::ifstream(GetParam().string() + ".expected.json"));
  const Metadata metadata_ = parse(files_);
};

TEST_P(ZarrGolden, TensorsHaveTheirExpectedBytes) {
  EXPECT_TRUE(zarr_format()->detect(directory_of(files_).names));
  const Json& tensors = expected_.at("tensors");
  EXPECT_EQ(metadata_.tensors.size(), tensors.size());
  for (const auto& [key, facts] : tensors.items()) {
    SCOPED_TRACE(key);
    const StoredTensor* tensor = metadata_.find_tensor(key);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->shape, Dims(facts.at("stored_shape").get<std::vector<int64_t>>()));
    EXPECT_EQ(to_string(tensor->dtype), facts.at("dtype").get<std::string>());
    EXPECT_EQ(crc32(assemble(metadata_, *tensor, files_)), facts.at("crc32").get<uint32_t>());
  }
}

TEST_P(ZarrGolden, ObjectsHaveTheirUniqueKeysAndAreReadable) {
  const Json& objects = expected_.at("objects");
  EXPECT_EQ(metadata_.objects.size(), objects.size());
  for (const auto& [key, text] : objects.items()) {
    SCOPED_TRACE(key);
    const StoredObject* object = metadata_.find_object(key);
    ASSERT_NE(object, nullptr);
    const Bytes& item = files_.at(metadata_.files[object->at.file]);
    EXPECT_FALSE(zarr_format()->verify_object(item));
    // Only values of kinds that are printed as in Python; the others are compared in Python's
    // tests.
    const Value value = zarr_format()->parse_object(item);
    if (value.kind() == Value::Kind::kDict || value.kind() == Value::Kind::kNull) {
      EXPECT_EQ(to_string(value), text.get<std::string>());
    }
  }
}

std::string test_name(const testing::TestParamInfo<fs::path>& golden) {
  std::string name =
      golden.param.parent_path().filename().string() + "_" + golden.param.filename().string();
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Golden, ZarrGolden, testing::ValuesIn(goldens()), test_name);

}  // namespace tilestone::zarr::golden_test
