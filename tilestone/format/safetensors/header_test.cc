#include "tilestone/format/safetensors/header_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "tilestone/base/error.h"
#include "tilestone/format/safetensors/weight_map_internal.h"

namespace tilestone::safetensors::header_test {

using testing::HasSubstr;

Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::kInternal, "nothing was thrown");
}

// Parses the text as the header of a file with `data` bytes after it.
std::vector<HeaderTensor> parse(std::string_view text, uint64_t data) {
  return parse_header(as_bytes(text), kLengthBytes + text.size() + data, "f");
}

constexpr std::string_view kTwo =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
    R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  )";

TEST(SafetensorsHeader, TensorsComeInTheOrderOfTheirPlaces) {
  const auto tensors = parse(kTwo, 16);
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].key, "a");
  EXPECT_EQ(tensors[0].shape, Dims());
  EXPECT_EQ(tensors[1].key, "b");
  EXPECT_EQ(tensors[1].dtype, DType::kBFloat16);
  EXPECT_EQ(tensors[1].shape, (Dims{2, 3}));
  EXPECT_EQ(tensors[1].begin, 4u);
}

TEST(SafetensorsHeader, PairsOf4BitElementsAreCountedSinglyInTheHeader) {
  const auto tensors = parse(R"({"q":{"dtype":"F4","shape":[3,8],"data_offsets":[0,12]}})", 12);
  EXPECT_EQ(tensors[0].dtype, DType::kFloat4E2M1FNX2);
  EXPECT_EQ(tensors[0].shape, (Dims{3, 4}));
}

TEST(SafetensorsHeader, WhatIsWrittenIsReadBackAndIsAligned) {
  std::vector<HeaderTensor> tensors;
  uint64_t bytes = 0;
  for (const DType dtype : all_dtypes()) {
    if (dtype == DType::kComplex32 || dtype == DType::kComplex128) continue;
    tensors.push_back(
        {.key = "k\n\"" + std::string(to_string(dtype)), .dtype = dtype, .shape = {2, 3}});
    bytes += 6 * itemsize(dtype);
  }
  const Bytes header = write_header(tensors);
  EXPECT_EQ(header.size() % 8, 0u);
  const uint64_t size = header.size() + bytes;
  const ByteView text = ByteView(header).subspan(kLengthBytes);
  EXPECT_EQ(header_length(ByteView(header).first(kLengthBytes), size, "f"), text.size());
  const auto read = parse_header(text, size, "f");
  ASSERT_EQ(read.size(), tensors.size());
  for (size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(read[i].key, tensors[i].key);
    EXPECT_EQ(read[i].dtype, tensors[i].dtype);
    EXPECT_EQ(read[i].shape, tensors[i].shape) << read[i].key;
  }
}

TEST(SafetensorsHeader, HostileHeadersAreRefused) {
  const std::string deep = R"({"a":)" + std::string(100'000, '[');
  const std::string deep_metadata = R"({"__metadata__":{"a":)" + std::string(100'000, '{');
  const std::pair<std::string, std::string> cases[] = {
      {"", "does not begin with {"},
      {" {}", "does not begin with {"},
      {"[]", "does not begin with {"},
      {"{", "invalid JSON"},
      {"{}{}", "invalid JSON"},
      {std::string("{}\0", 3), "invalid JSON"},
      {"{\"a\xff\":{}}", "invalid JSON"},
      {deep, "nested deeper"},
      {deep_metadata, "invalid JSON"},
      {R"({"__metadata__":{"a":1}})", "no text at \"a\""},
      {R"({"a":5})", "an object is missing"},
      {R"({"a":{}})", "\"dtype\" is missing"},
      {R"({"a":{"dtype":"U8","shape":[1]}})", "\"data_offsets\" is missing"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", "must have two numbers"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})",
       "a number in \"shape\" is invalid"},
      {R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})",
       "a number in \"shape\" is invalid"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", "is invalid"},
      {R"({"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}})", "is no text"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":0}})", "unknown field \"x\""},
      {R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "occurs twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[0],)"
       R"("data_offsets":[1,1]}})",
       "\"a\" occurs twice"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}})", "has 2 bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", "data_offsets are 1 and 0"},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", "too large"},
      {R"({"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})",
       "too large"},
      {R"({"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})",
       "a number in \"shape\" is too large"},
      {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", "too large"},
      // A gap before, between, after; an overlap.
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", "begins at 1"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", "has 1 bytes after its header"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "the tensors have 2 bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       "inside the one before it"},
      {R"({"a":{"dtype":"U8","shape":[)" + std::string(200, '1') + "]}}",
       "a number in \"shape\" is invalid"},
      {R"({"a":{"dtype":"U8","shape":[1)" +
           [] {
             std::string ones;
             for (int i = 0; i < 64; ++i) ones += ",1";
             return ones;
           }() +
           R"(],"data_offsets":[0,1]}})",
       "too long"},
  };
  for (const auto& [text, problem] : cases) {
    const Error error = error_of([&] { parse(text, 1); });
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << text.substr(0, 80);
    EXPECT_THAT(error.message(), HasSubstr(problem)) << text.substr(0, 80);
    EXPECT_EQ(error.file(), "f");
  }
}

TEST(SafetensorsHeader, TensorsOfDTypesThatTilestoneLacksAreUnsupportedBesideOthers) {
  for (const char* dtype : {"F6_E2M3", "F6_E3M2", "I4", ""}) {
    const std::string text =
        std::string(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"k":{"dtype":")") +
        dtype + R"(","shape":[4],"data_offsets":[1,4]}})";
    const auto tensors = parse(text, 4);
    EXPECT_EQ(tensors.at(0).unsupported, "");
    EXPECT_EQ(tensors.at(1).unsupported, std::string("dtype ") + dtype + ", shape [4]");
  }
  const auto odd = parse(R"({"k":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2);
  EXPECT_THAT(odd.at(0).unsupported, HasSubstr("not even"));
  const Error gap =
      error_of([] { parse(R"({"k":{"dtype":"X","shape":[3],"data_offsets":[1,2]}})", 2); });
  EXPECT_EQ(gap.code(), ErrorCode::kCorrupt);
}

TEST(SafetensorsHeader, SaysWherePiecesBegin) {
  const SafetensorsPieces found = parse_sharding_info(
      R"({"w":{"saved_offsets":[4,0],"whole_shape":[8,3]},"s":{"saved_offsets":[]}})");
  EXPECT_EQ(found.at("w").at, (Dims{4, 0}));
  EXPECT_EQ(found.at("w").whole, (Dims{8, 3}));
  EXPECT_EQ(found.at("s").at, Dims());
  EXPECT_FALSE(found.at("s").whole);
  EXPECT_TRUE(parse_sharding_info("").empty());
  for (const char* bad :
       {"[]", "{", "5", R"({"w":5})", R"({"w":{}})", R"({"w":{"saved_offsets":5}})",
        R"({"w":{"saved_offsets":[-1]}})", R"({"w":{"saved_offsets":[9223372036854775808]}})",
        R"({"w":{"saved_offsets":[[1]]}})", R"({"w":{"saved_offsets":[{}]}})", R"({"w":{"x":[1]}})",
        R"({"w":{"saved_offsets":[1],"saved_offsets":[1]}})", R"({"w":{"whole_shape":[1]}})",
        R"({"w":{"saved_offsets":[1],"whole_shape":[1],"whole_shape":[1]}})",
        R"({"w":{"saved_offsets":[1]},"w":{"saved_offsets":[1]}})"}) {
    EXPECT_EQ(error_of([&] { parse_sharding_info(bad); }).code(), ErrorCode::kCorrupt) << bad;
  }
  const std::string text =
      R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"k\":{\"saved_offsets\":[4,0]}}"},)"
      R"("k":{"dtype":"U8","shape":[1,2],"data_offsets":[0,2]}})";
  EXPECT_EQ(parse(text, 2).at(0).piece.value().at, (Dims{4, 0}));
}

TEST(SafetensorsHeader, LengthsBeyondTheFileOrTheLimitAreRefused) {
  const auto code_of = [](uint64_t length, uint64_t file_size) {
    Bytes first(kLengthBytes);
    std::memcpy(first.data(), &length, sizeof length);
    return error_of([&] { header_length(first, file_size, "f"); }).code();
  };
  EXPECT_EQ(code_of(3, 10), ErrorCode::kCorrupt);
  EXPECT_EQ(code_of(UINT64_MAX, 100), ErrorCode::kCorrupt);
  EXPECT_EQ(code_of(kMaxHeader + 1, UINT64_MAX), ErrorCode::kCorrupt);
  EXPECT_EQ(code_of(2, 10), ErrorCode::kInternal);  // nothing was thrown
  EXPECT_EQ(error_of([] { header_length({}, 0, "f"); }).code(), ErrorCode::kCorrupt);
}

TEST(WeightMap, IsReadAndWritten) {
  const WeightMap map{{"a", "x.safetensors"}, {"b", "y.safetensors"}};
  const Bytes text = write_weight_map(map, 7);
  EXPECT_EQ(parse_weight_map(text, "i"), map);
  EXPECT_EQ(as_text(text),
            "{\n  \"metadata\": {\n    \"total_size\": 7\n  },\n  \"weight_map\": {\n"
            "    \"a\": \"x.safetensors\",\n    \"b\": \"y.safetensors\"\n  }\n}\n");
  EXPECT_TRUE(
      parse_weight_map(as_bytes(R"({"metadata":{"x":[{"a":1}]},"weight_map":{}})"), "i").empty());
}

TEST(WeightMap, HostileIndexesAreRefused) {
  const std::pair<std::string, ErrorCode> cases[] = {
      {"", ErrorCode::kCorrupt},
      {"[]", ErrorCode::kCorrupt},
      {"{}", ErrorCode::kCorrupt},
      {R"({"weight_map":5})", ErrorCode::kCorrupt},
      {R"({"weight_map":{"a":5}})", ErrorCode::kCorrupt},
      {R"({"weight_map":{"a":{"b":"c"}}})", ErrorCode::kCorrupt},
      {R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})", ErrorCode::kCorrupt},
      {R"({"weight_map":{},"weight_map":{}})", ErrorCode::kCorrupt},
      {R"({"weight_map":{},"x":)" + std::string(100'000, '['), ErrorCode::kCorrupt},
      {std::string("{\"weight_map\":{}}\0{", 18), ErrorCode::kCorrupt},
      {R"({"weight_map":{"a":"../x.safetensors"}})", ErrorCode::kUnsafe},
      {R"({"weight_map":{"a":"/etc/x.safetensors"}})", ErrorCode::kUnsafe},
      {R"({"weight_map":{"a":""}})", ErrorCode::kUnsafe},
      {R"({"weight_map":{"a":"x.bin"}})", ErrorCode::kUnsupported},
      {R"({"weight_map":{"a":"sub/x.safetensors"}})", ErrorCode::kUnsupported},
  };
  for (const auto& [text, code] : cases) {
    const Error error = error_of([&] { parse_weight_map(as_bytes(text), "i"); });
    EXPECT_EQ(error.code(), code) << text.substr(0, 80) << error.what();
    // Otherwise it is the name in the index.
    EXPECT_TRUE(code == ErrorCode::kUnsafe || error.file() == "i") << error.what();
  }
}

}  // namespace tilestone::safetensors::header_test
