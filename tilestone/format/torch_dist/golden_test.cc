// Reads every tensor and object of the checkpoints in tests/golden with the format's functions.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/torch_dist/checkpoint_testing.h"
#include "tilestone/format/torch_dist/torch_dist.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::golden_test {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const fs::path kGolden = TILESTONE_GOLDEN_DIR;

Bytes content(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)),
                         std::istreambuf_iterator<char>());
  return to_bytes(text);
}

struct Golden {
  std::string name;  // "torch-2.6.0/dcp-w4"
};

void PrintTo(const Golden& golden, std::ostream* out) { *out << golden.name; }

// The checkpoints in folders whose name starts with `folder`, without those of other formats.
std::vector<Golden> goldens(const std::string& folder) {
  std::vector<Golden> found;
  for (const fs::directory_entry& writer : fs::directory_iterator(kGolden)) {
    const std::string writer_name = writer.path().filename().string();
    if (!writer.is_directory() || !writer_name.starts_with(folder)) continue;
    for (const fs::directory_entry& checkpoint : fs::directory_iterator(writer.path())) {
      const std::string name = checkpoint.path().filename().string();
      if (checkpoint.is_directory() && !name.starts_with("zarr")) {
        found.push_back({writer_name + "/" + name});
      }
    }
  }
  std::sort(found.begin(), found.end(),
            [](const Golden& a, const Golden& b) { return a.name < b.name; });
  return found;
}

// One checkpoint in memory.
class Opened {
 public:
  explicit Opened(const Golden& golden)
      : expected(Json::parse(std::ifstream(kGolden / (golden.name + ".expected.json")))) {
    for (const fs::directory_entry& file : fs::directory_iterator(kGolden / golden.name)) {
      files_.emplace(file.path().filename().string(), content(file.path()));
    }
    EXPECT_TRUE(format->detect(torch_dist::directory_of(files_).names));
    metadata = torch_dist::parse(*format, files_);
  }

  ByteView item(const ItemLocation& at) const {
    return ByteView(files_.at(metadata.files[at.file])).subspan(at.offset, at.length);
  }

  // Finds the payload as the engine does: from the probed ranges only.
  StoredPayload payload(const ItemLocation& at) const {
    std::vector<ByteView> probed;
    for (const ProbeRange& range : format->probe(at)) {
      probed.push_back(item(at).subspan(range.offset, range.size));
    }
    return format->parse_tensor({}, {}, at, probed);
  }

  // The whole tensor, C-contiguous.
  Bytes assemble(const StoredTensor& tensor) const {
    const uint64_t size = itemsize(tensor.dtype);
    Bytes whole(static_cast<uint64_t>(numel(tensor.shape)) * size);
    const StridedView target = StridedView::contiguous(whole.data(), tensor.shape, size);
    for (const StoredChunk& chunk : tensor.chunks) {
      const StoredPayload stored = payload(chunk.at);
      EXPECT_EQ(stored.dtype, tensor.dtype);
      if (chunk.box.empty()) continue;
      // Prepended axes of size 1 may be missing in the stored tensor. An item of a flattened tensor
      // holds several chunks, one after the other.
      Dims strides = stored.strides;
      if (chunk.flat || !(stored.shape == chunk.box.shape)) {
        EXPECT_EQ(numel(stored.shape), numel(item_shape(chunk)));
        EXPECT_EQ(stored.strides, contiguous_strides(stored.shape));
        strides = contiguous_strides(chunk.box.shape);
      }
      Bytes bytes(item(chunk.at).begin(), item(chunk.at).end());
      const uint64_t first = stored.offset + begin_in_item(chunk, tensor.dtype);
      const StridedView source{bytes.data() + first, chunk.box.shape, strides, size};
      strided_copy(target.narrow(chunk.box), source);
    }
    return whole;
  }

  const std::shared_ptr<const Format> format = torch_dist_format();
  Json expected;
  Metadata metadata;

 private:
  FileImage files_;
};

class EveryGolden : public testing::TestWithParam<Golden> {};
class TorchGolden : public testing::TestWithParam<Golden> {};
class MegatronGolden : public testing::TestWithParam<Golden> {};

std::string test_name(const testing::TestParamInfo<Golden>& info) {
  std::string name = info.param.name;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

TEST_P(EveryGolden, TensorsHaveTheirExpectedBytes) {
  const Opened checkpoint(GetParam());
  const Json& tensors = checkpoint.expected.at("tensors");
  EXPECT_EQ(checkpoint.metadata.tensors.size(), tensors.size());
  for (const auto& [key, facts] : tensors.items()) {
    SCOPED_TRACE(key);
    const StoredTensor* tensor = checkpoint.metadata.find_tensor(key);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->shape, Dims(facts.at("shape").get<std::vector<int64_t>>()));
    EXPECT_EQ(to_string(tensor->dtype), facts.at("dtype").get<std::string>());
    EXPECT_EQ(crc32(checkpoint.assemble(*tensor)), facts.at("crc32").get<uint32_t>());
  }
}

TEST_P(EveryGolden, EveryItemPassesVerification) {
  const Opened checkpoint(GetParam());
  const auto verify = [&](const std::string& key, const ItemLocation& at) {
    const auto fault = checkpoint.format->verify_object(checkpoint.item(at));
    EXPECT_FALSE(fault) << key << ": " << fault->problem;
  };
  for (const StoredTensor& tensor : checkpoint.metadata.tensors) {
    for (const StoredChunk& chunk : tensor.chunks) verify(tensor.key, chunk.at);
  }
  for (const StoredObject& object : checkpoint.metadata.objects) verify(object.key, object.at);
}

TEST_P(EveryGolden, AFlippedPayloadByteIsFound) {
  const Opened checkpoint(GetParam());
  for (const StoredTensor& tensor : checkpoint.metadata.tensors) {
    for (const StoredChunk& chunk : tensor.chunks) {
      const StoredPayload payload = checkpoint.payload(chunk.at);
      if (payload.record_size == 0) continue;
      const ByteView item = checkpoint.item(chunk.at);
      Bytes damaged(item.begin(), item.end());
      damaged[payload.record_offset + payload.record_size / 2] ^= std::byte{1};
      const auto fault = checkpoint.format->verify_object(damaged);
      ASSERT_TRUE(fault) << tensor.key;
      EXPECT_EQ(fault->offset, payload.record_offset) << tensor.key;
    }
  }
}

TEST_P(TorchGolden, ObjectsHaveTheirExpectedValues) {
  const Opened checkpoint(GetParam());
  const Json& objects = checkpoint.expected.at("objects");
  ASSERT_FALSE(objects.empty());
  // Since torch 2.4 every dict is taken apart. Before, a dict of plain values was a single object.
  const StoredObject* dict = checkpoint.metadata.find_object("common");
  for (const auto& [name, repr] : objects.items()) {
    SCOPED_TRACE(name);
    const StoredObject* object = checkpoint.metadata.find_object("common." + name);
    ASSERT_NE(object != nullptr ? object : dict, nullptr);
    const Value value =
        checkpoint.format->parse_object(checkpoint.item((object != nullptr ? object : dict)->at));
    const Value* wanted = object != nullptr ? &value : value.find(name);
    ASSERT_NE(wanted, nullptr);
    EXPECT_EQ(to_string(*wanted), repr.get<std::string>());
  }
}

TEST_P(TorchGolden, PathsAreThoseOfTheTree) {
  const Opened checkpoint(GetParam());
  const bool recorded = !GetParam().name.starts_with("torch-1.13");  // planner_data is None there
  for (const StoredTensor& tensor : checkpoint.metadata.tensors) {
    EXPECT_EQ(dotted(tensor.path), recorded ? tensor.key : "");
  }
  for (const StoredObject& object : checkpoint.metadata.objects) {
    EXPECT_EQ(dotted(object.path), recorded ? object.key : "");
  }
}

// A value in the form of the expected files of Megatron's golden checkpoints.
std::string describe(const Value& value);

std::string joined(const Value::List& items) {
  std::string text;
  for (const Value& item : items) text += (text.empty() ? "" : ", ") + describe(item);
  return text;
}

std::string describe_opaque(const Value& value) {
  const Opaque& opaque = value.as_opaque();
  if (opaque.module == "_io" && opaque.name == "BytesIO") {
    return "BytesIO " + to_string(opaque.state.items().at(0));
  }
  return to_string(value);
}

std::string describe(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kList:
      return "list(" + joined(value.items()) + ")";
    case Value::Kind::kTuple:
      return "tuple(" + joined(value.items()) + ")";
    case Value::Kind::kOpaque:
      return describe_opaque(value);
    case Value::Kind::kDict: {
      std::string text;
      for (const auto& [key, item] : value.as_dict()) {
        text += (text.empty() ? "" : ", ") + to_string(key) + ": " + describe(item);
      }
      return "{" + text + "}";
    }
    case Value::Kind::kTensor: {
      const TensorView& tensor = value.as_tensor();
      Bytes bytes(tensor.bytes());
      pack_range(tensor.strided_view(), 0, bytes);
      return "tensor " + std::string(to_string(tensor.dtype)) + " " + to_string(tensor.shape) +
             " crc32=" + std::to_string(crc32(bytes));
    }
    default:
      return to_string(value);
  }
}

TEST_P(MegatronGolden, ObjectsHaveTheirExpectedValues) {
  const Opened checkpoint(GetParam());
  const Json& objects = checkpoint.expected.at("objects");
  for (const auto& [key, text] : objects.items()) {
    SCOPED_TRACE(key);
    const StoredObject* object = checkpoint.metadata.find_object(key);
    ASSERT_NE(object, nullptr);
    // Megatron stores every object in a list of one.
    const Value value = checkpoint.format->parse_object(checkpoint.item(object->at));
    ASSERT_EQ(value.items().size(), 1u);
    EXPECT_EQ(describe(value.items()[0]), text.get<std::string>());
  }
}

TEST_P(MegatronGolden, CommonStateHasItsExpectedValues) {
  const Opened checkpoint(GetParam());
  const fs::path file = kGolden / GetParam().name / "common.pt";
  const StoredObject* object = checkpoint.metadata.find_object("common_state/shard_0_1");
  ASSERT_NE(fs::exists(file), object != nullptr);
  const Value common =
      object == nullptr
          ? read_torch_archive(content(file))
          : checkpoint.format->parse_object(checkpoint.item(object->at)).items().at(0);
  for (const auto& [name, text] : checkpoint.expected.at("common").items()) {
    SCOPED_TRACE(name);
    const Value* value = common.find(name);
    ASSERT_NE(value, nullptr);
    if (value->kind() == Value::Kind::kOpaque) {
      EXPECT_EQ(value->as_opaque().module + "." + value->as_opaque().name, "argparse.Namespace");
    } else {
      EXPECT_EQ(describe(*value), text.get<std::string>());
    }
  }
}

std::vector<Golden> all_goldens() {
  std::vector<Golden> all = goldens("torch");
  for (const Golden& golden : goldens("megatron")) all.push_back(golden);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Golden, EveryGolden, testing::ValuesIn(all_goldens()), test_name);
INSTANTIATE_TEST_SUITE_P(Golden, TorchGolden, testing::ValuesIn(goldens("torch")), test_name);
INSTANTIATE_TEST_SUITE_P(Golden, MegatronGolden, testing::ValuesIn(goldens("megatron")), test_name);

}  // namespace tilestone::golden_test
