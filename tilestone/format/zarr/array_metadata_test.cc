#include "tilestone/format/zarr/array_metadata_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tilestone/base/error.h"
#include "tilestone/format/zarr/dtype_names_internal.h"

namespace tilestone::zarr::array_metadata_test {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A valid description in which one field's value is replaced, or to which fields are added.
std::string description(const std::string& name = "", const std::string& value = "") {
  std::string text = "{";
  const std::pair<const char*, const char*> fields[] = {
      {"chunks", "[2, 3]"}, {"compressor", "null"}, {"dtype", "\"<f4\""}, {"fill_value", "null"},
      {"filters", "null"},  {"order", "\"C\""},     {"shape", "[4, 7]"},  {"zarr_format", "2"},
  };
  bool replaced = name.empty();
  for (const auto& [field, usual] : fields) {
    replaced = replaced || field == name;
    if (text.size() > 1) text += ", ";
    text += "\"" + std::string(field) + "\": " + (field == name ? value : usual);
  }
  if (!replaced) text += ", \"" + name + "\": " + value;
  return text + "}";
}

ArrayMetadata parse(const std::string& text) { return parse_array(as_bytes(text), "w/.zarray"); }

// The code of the error that parsing throws. Checks the error's file and message.
ErrorCode refusal(const std::string& text, const std::string& problem) {
  try {
    parse(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.file(), "w/.zarray") << text;
    EXPECT_THAT(error.message(), HasSubstr(problem)) << text;
    return error.code();
  }
  ADD_FAILURE() << "read: " << text;
  return ErrorCode::kInternal;
}

TEST(ZarrArray, OfEveryGoldenIsWrittenAsStockWroteIt) {
  size_t found = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(TILESTONE_GOLDEN_DIR)) {
    if (entry.path().filename() != ".zarray") continue;
    ++found;
    std::ifstream stream(entry.path(), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(stream)), {});
    EXPECT_EQ(as_text(write_array(parse(text))), text) << entry.path();
  }
  EXPECT_GT(found, 50u);
}

TEST(ZarrArray, ReadsWhatItWrites) {
  for (const DType dtype : all_dtypes()) {
    if (!name_of(dtype)) continue;
    for (const bool fortran : {false, true}) {
      for (const char separator : {'.', '/'}) {
        for (const auto& [shape, chunks] : {std::pair<Dims, Dims>{{4, 7}, {2, 3}},
                                            {Dims(), Dims()},
                                            {{0, 5}, {1, 5}},
                                            {{2}, {9}}}) {
          const ArrayMetadata array{dtype, shape, chunks, fortran, separator};
          EXPECT_EQ(parse_array(write_array(array), "w/.zarray"), array) << to_string(dtype);
        }
      }
    }
  }
}

TEST(ZarrArray, SaysWhereAChunksElementsLie) {
  ArrayMetadata array = parse(description("chunks", "[2, 3]"));
  EXPECT_EQ(array.chunk_bytes(), 24u);
  EXPECT_EQ(array.chunk_strides(), (Dims{3, 1}));
  array = parse(description("order", "\"F\""));
  EXPECT_EQ(array.chunk_strides(), (Dims{1, 2}));
}

TEST(ZarrArray, OfADimWithoutElementsMayHaveChunksOfNone) {
  const std::string text =
      R"({"shape": [0, 5], "chunks": [0, 5], "dtype": "<f4", "fill_value": 0.0, "order": "C",)"
      R"( "filters": [], "dimension_separator": ".", "compressor": null, "zarr_format": 2})";
  EXPECT_EQ(parse(text).chunk_shape, (Dims{1, 5}));
  EXPECT_EQ(refusal(description("chunks", "[0, 3]"), "hold no element"), ErrorCode::kCorrupt);
}

TEST(ZarrArray, LeavesUnknownFieldsAndFillValuesAlone) {
  EXPECT_EQ(parse(description("later", "{\"a\": [1, {}]}")), parse(description()));
  for (const char* fill : {"0", "1.5", "\"NaN\"", "[0.0, 0.0]", "false"}) {
    EXPECT_EQ(parse(description("fill_value", fill)), parse(description()));
  }
}

TEST(ZarrArray, DamageIsRefusedAsCorrupt) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "invalid JSON"},
      {"[]", "not a JSON object"},
      {"{\"shape\": [4", "invalid JSON at byte"},
      {description() + "}", "invalid JSON at byte"},
      {"{\"\xff\": 1}", "invalid JSON"},
      {"{}", "\"zarr_format\" is missing"},
      {description("order", "\"C\", \"order\": \"F\""), "\"order\" occurs twice"},
      {description("later", std::string(100000, '[')), "nested deeper"},
      {description("shape", "[4, NaN]"), "invalid JSON"},
      {description("shape", "[4, -7]"), "from 0 to 2^63 - 1"},
      {description("shape", "[4, 7.0]"), "from 0 to 2^63 - 1"},
      {description("shape", "[4, 9223372036854775808]"), "from 0 to 2^63 - 1"},
      {description("shape", "[4, 1" + std::string(400, '0') + "]"), "invalid JSON"},
      {description("shape", "[4, true]"), "from 0 to 2^63 - 1"},
      {description("shape", "4"), "is not a list"},
      {description("shape", "[4]"), "differ in their number of dims"},
      {description("shape", "[4294967296, 4294967296]"), "too large"},
      {description("shape", "[0, 9223372036854775807]"), "too large"},
      {description("chunks", "[4294967296, 4294967296]"), "too large"},
      {description("chunks", "[" + std::string(300, '0') + "]"), "invalid JSON"},
      {description("dtype", "4"), "\"dtype\""},
      {description("order", "\"A\""), "\"order\""},
      {description("order", "null"), "\"order\""},
      {description("dimension_separator", "\"-\""), "\"dimension_separator\""},
      {description("zarr_format", "\"2\""), "\"zarr_format\""},
  };
  for (const auto& [text, problem] : cases) {
    EXPECT_EQ(refusal(text, problem), ErrorCode::kCorrupt) << text.substr(0, 200);
  }
  std::string many = "[1";
  for (int i = 0; i < 70; ++i) many += ", 1";
  EXPECT_EQ(refusal(description("shape", many + "]"), "71 dims"), ErrorCode::kCorrupt);
}

TEST(ZarrArray, EveryFieldOfTheSpecIsAskedFor) {
  for (const char* field : {"chunks", "compressor", "dtype", "fill_value", "filters", "order",
                            "shape", "zarr_format"}) {
    std::string text = description();
    text.replace(text.find(field), 1, "_");
    EXPECT_EQ(refusal(text, "\"" + std::string(field) + "\" is missing"), ErrorCode::kCorrupt);
  }
}

TEST(ZarrArray, WhatIsNotReadHereIsRefusedAsUnsupported) {
  const std::pair<std::string, std::string> cases[] = {
      {description("zarr_format", "3"), "zarr version 3"},
      {description("compressor", R"({"id": "blosc", "clevel": 5})"), "compressed with blosc"},
      {description("compressor", "7"), "compressed"},
      {description("filters", R"([{"id": "delta"}])"), "filtered"},
      {description("dtype", "\">f4\""), "big-endian"},
      {description("dtype", R"([["a", "<f4"], ["b", "<i4", [2]]])"), "structured"},
      {description("dtype", "\"<V2\""), "\"<V2\""},
      {description("dtype", "\"<M8[ns]\""), "<M8[ns]"},
      {description("dtype", "\"|O\""), "|O"},
      {description("dtype", "\"" + std::string(1000, 'x') + "\""), std::string(40, 'x') + "\""},
  };
  for (const auto& [text, problem] : cases) {
    EXPECT_EQ(refusal(text, problem), ErrorCode::kUnsupported) << text.substr(0, 200);
  }
}

TEST(ZarrDType, NamesAreThoseOfStock) {
  EXPECT_EQ(name_of(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(name_of(DType::kBool), "|b1");
  EXPECT_EQ(name_of(DType::kComplex128), "<c16");
  for (const DType dtype : all_dtypes()) {
    if (const auto name = name_of(dtype)) {
      EXPECT_EQ(dtype_named(*name), dtype) << *name;
    }
  }
  EXPECT_EQ(dtype_named("<u1"), DType::kUInt8);
  EXPECT_EQ(dtype_named("float8_e4m3fn"), DType::kFloat8E4M3FN);
}

TEST(ZarrDType, WithoutANameThatMegatronReadsIsNotWritten) {
  for (const DType dtype :
       {DType::kComplex32, DType::kFloat8E4M3FN, DType::kFloat8E5M2, DType::kFloat8E4M3FNUZ,
        DType::kFloat8E5M2FNUZ, DType::kFloat8E8M0FNU, DType::kFloat4E2M1FNX2}) {
    EXPECT_FALSE(name_of(dtype)) << to_string(dtype);
  }
}

}  // namespace tilestone::zarr::array_metadata_test
