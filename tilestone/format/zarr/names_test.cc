#include "tilestone/format/zarr/names_internal.h"

#include <gtest/gtest.h>

#include "tilestone/base/error.h"

namespace tilestone::zarr::names_test {

template <typename Check>
void expect_refused(Check check, const std::string& key) {
  try {
    check(key);
    ADD_FAILURE() << "accepted: " << key;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << key;
    EXPECT_EQ(error.key(), key);
  }
}

TEST(ZarrNames, KeysThatCantBePathsAreRefusedByName) {
  for (const char* key : {"",
                          "/",
                          "/w",
                          "w/",
                          "a//b",
                          ".",
                          "..",
                          "../w",
                          "a/../b",
                          "a/./b",
                          ".zarray",
                          "w/.zarray",
                          ".zattrs",
                          "a/.zgroup",
                          "zarr.json",
                          "metadata.json",
                          "common.pt",
                          "common.pt/w",
                          ".metadata",
                          ".tilestone",
                          ".tilestone/w"}) {
    expect_refused(check_tensor_key, key);
    expect_refused(check_object_key, key);
  }
  expect_refused(check_tensor_key, std::string("w\0x", 3));
  expect_refused(check_tensor_key, std::string(256, 'k'));
  expect_refused(check_tensor_key, std::string(256, 'k') + "/w");
  expect_refused(check_object_key, std::string(253, 'k'));
  EXPECT_NO_THROW(check_tensor_key(std::string(255, 'k')));
  EXPECT_NO_THROW(check_object_key(std::string(252, 'k')));
}

TEST(ZarrNames, ObjectsThatWouldBeReadAsSomethingElseAreRefused) {
  expect_refused(check_object_key, "common");
  expect_refused(check_object_key, "rng/shard_0.1_2");  // an old name, in a grid of 2 dims
  EXPECT_NO_THROW(check_object_key("a/common.x"));
  EXPECT_NO_THROW(check_object_key("rng/shard_0_2"));
  EXPECT_NO_THROW(check_object_key("rng/shard_0.1_2.2"));
}

TEST(ZarrNames, OrdinaryKeysAreAccepted) {
  for (const char* key : {"w", "layers.0.weight", "a/b/c", "ключ ✓", ".hidden", "...", "0.0", "a b",
                          "shard_0_1", "w.sync", "a\\b", "w.pt"}) {
    EXPECT_NO_THROW(check_tensor_key(key)) << key;
    EXPECT_NO_THROW(check_object_key(key)) << key;
  }
}

TEST(ZarrNames, OfFilesAndTheirInverse) {
  EXPECT_EQ(array_file("a/w"), "a/w/.zarray");
  EXPECT_EQ(key_of_array_file("a/w/.zarray"), "a/w");
  EXPECT_EQ(key_of_array_file(".zarray"), std::nullopt);
  EXPECT_EQ(key_of_array_file("w/x.zarray"), std::nullopt);
  EXPECT_EQ(object_file("rng/shard_0_1"), "rng/shard_0_1.pt");
  EXPECT_EQ(key_of_object_file("rng/shard_0_1.pt"), "rng/shard_0_1");
  for (const char* name : {"common.pt", "a/common.pt", ".pt", "a/.pt", "w/0.0", "pt"}) {
    EXPECT_EQ(key_of_object_file(name), std::nullopt) << name;
  }
}

TEST(ZarrNames, OfChunksAndTheirInverse) {
  EXPECT_EQ(chunk_name(Dims(), '.'), "0");
  EXPECT_EQ(chunk_name({0}, '.'), "0");
  EXPECT_EQ(chunk_name({0, 12, 3}, '.'), "0.12.3");
  EXPECT_EQ(chunk_name({0, 12, 3}, '/'), "0/12/3");
  EXPECT_EQ(parse_chunk_name("0", 0, '.'), Dims());
  EXPECT_EQ(parse_chunk_name("0.12.3", 3, '.'), (Dims{0, 12, 3}));
  EXPECT_EQ(parse_chunk_name("0/12/3", 3, '/'), (Dims{0, 12, 3}));
  EXPECT_EQ(parse_chunk_name("9223372036854775807", 1, '.'), (Dims{INT64_MAX}));
}

TEST(ZarrNames, WhatNamesNoChunkIsNotTakenForOne) {
  for (const char* name : {"", ".", "0.", ".0", "0..1", "00.1", "-1.0", "+1.0", "0.1.2", "0", "a.b",
                           "0.1 ", "0x1.0", "9223372036854775808.0", "0/1", ".zarray"}) {
    EXPECT_EQ(parse_chunk_name(name, 2, '.'), std::nullopt) << name;
  }
  EXPECT_EQ(parse_chunk_name("1", 0, '.'), std::nullopt);
  EXPECT_TRUE(resembles_chunk_name("w/0.0"));
  EXPECT_TRUE(resembles_chunk_name("w/3"));
  EXPECT_FALSE(resembles_chunk_name("w/.zarray"));
  EXPECT_FALSE(resembles_chunk_name("0/w"));
}

TEST(ZarrNames, ObjectPlacesOfAllVersions) {
  const auto cell = parse_object_cell("a/rng/shard_0.1_2.3");
  ASSERT_TRUE(cell);
  EXPECT_EQ(cell->key, "a/rng");
  EXPECT_EQ(cell->offset, (Dims{0, 1}));
  EXPECT_EQ(cell->shape, (Dims{2, 3}));
  EXPECT_FALSE(cell->shape_is_cut());
  const auto cut = parse_object_cell("rng/shard_0.1_2");
  ASSERT_TRUE(cut);
  EXPECT_TRUE(cut->shape_is_cut());
  for (const char* key :
       {"shard_0_1", "rng", "rng/shard_0", "rng/shard__", "rng/shard_0_1_2", "rng/shard_0_1.2",
        "rng/shard_0.1.2_1", "rng/shard_x_1", "rng/Shard_0_1"}) {
    EXPECT_FALSE(parse_object_cell(key)) << key;
  }
}

}  // namespace tilestone::zarr::names_test
