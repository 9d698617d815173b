#include "tilestone/format/zarr/zarr.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "tilestone/base/error_testing.h"
#include "tilestone/format/zarr/zarr_testing.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::zarr::zarr_test {

using testing::ElementsAre;
using testing::HasSubstr;

// A tensor whose bytes count up, cut into the cells of a grid.
TensorItem tensor_of(const std::string& key, DType dtype, const Dims& shape, const Dims& cell) {
  const TensorView whole = TensorView::allocate(dtype, shape);
  for (uint64_t i = 0; i < whole.bytes(); ++i) whole.data[i] = static_cast<std::byte>(i + 1);
  TensorItem item{.key = key, .path = {}, .dtype = dtype, .global_shape = shape, .pieces = {}};
  std::vector<Box> boxes{Box::whole(Dims())};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<Box> next;
    for (const Box& box : boxes) {
      for (int64_t begin = 0; begin < shape[d]; begin += cell[d]) {
        next.push_back(box);
        next.back().offset.push_back(begin);
        next.back().shape.push_back(std::min(cell[d], shape[d] - begin));
      }
    }
    boxes = std::move(next);
  }
  for (const Box& box : boxes) item.pieces.push_back({box, whole.narrow(box)});
  if (boxes.empty()) item.pieces.push_back({Box::whole(shape), whole});
  return item;
}

Bytes bytes_of(const TensorItem& item) {
  Bytes whole(static_cast<uint64_t>(numel(item.global_shape)) * itemsize(item.dtype));
  const StridedView target =
      StridedView::contiguous(whole.data(), item.global_shape, itemsize(item.dtype));
  for (const Piece& piece : item.pieces) {
    strided_copy(target.narrow(piece.box), piece.data.strided_view());
  }
  return whole;
}

Items items_of(std::vector<TensorItem> tensors, std::vector<std::string> objects = {}) {
  Items items;
  items.tensors = std::move(tensors);
  for (std::string& key : objects) {
    items.objects.push_back(
        {.key = std::move(key), .path = {}, .value = Value("v"), .replica_id = {}});
  }
  return items;
}

std::vector<std::string> names_of(const FileImage& files) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files) names.push_back(name);
  return names;
}

TEST(ZarrFormat, ReadsWhatItWritesForEveryDTypeAndGrid) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<TensorItem> tensors;
    for (const DType dtype : {DType::kBFloat16, DType::kUInt8, DType::kComplex128}) {
      Dims shape, cell;
      for (size_t d = random() % 4; d > 0; --d) {
        shape.push_back(static_cast<int64_t>(random() % 6));
        cell.push_back(1 + static_cast<int64_t>(random() % 4));
      }
      tensors.push_back(tensor_of("a/" + std::to_string(tensors.size()) + "w", dtype, shape, cell));
    }
    const FileImage files = write(items_of(tensors));
    const Metadata metadata = parse(files);
    ASSERT_EQ(metadata.tensors.size(), tensors.size());
    for (const TensorItem& item : tensors) {
      const StoredTensor* stored = metadata.find_tensor(item.key);
      ASSERT_NE(stored, nullptr);
      EXPECT_EQ(stored->dtype, item.dtype);
      EXPECT_EQ(stored->shape, item.global_shape);
      EXPECT_EQ(assemble(metadata, *stored, files), bytes_of(item)) << to_string(stored->shape);
    }
  }
}

TEST(ZarrFormat, EdgeChunksHaveTheSizeOfACellAndZerosOutside) {
  const FileImage files = write(items_of({tensor_of("w", DType::kUInt8, {2, 5}, {2, 3})}));
  EXPECT_THAT(names_of(files), ElementsAre("metadata.json", "w/.zarray", "w/0.0", "w/0.1"));
  const auto b = [](int value) { return static_cast<std::byte>(value); };
  EXPECT_THAT(files.at("w/0.0"), ElementsAre(b(1), b(2), b(3), b(6), b(7), b(8)));
  EXPECT_THAT(files.at("w/0.1"), ElementsAre(b(4), b(5), b(0), b(9), b(10), b(0)));
}

TEST(ZarrFormat, PrependedAxesMayBeMissingInTheLocalTensor) {
  TensorItem item{
      .key = "w", .path = {}, .dtype = DType::kUInt8, .global_shape = {3, 2}, .pieces = {}};
  for (int64_t layer = 0; layer < 3; ++layer) {
    item.pieces.push_back({{{layer, 0}, {1, 2}}, TensorView::allocate(DType::kUInt8, {2})});
  }
  const Metadata metadata = parse(write(items_of({item})));
  EXPECT_EQ(metadata.tensors[0].chunk_shape, (Dims{1, 2}));
  EXPECT_EQ(metadata.tensors[0].chunks.size(), 3u);
}

TEST(ZarrFormat, ObjectsAreFilesOfTheirKeys) {
  const FileImage files = write(items_of({}, {"rng/shard_0.1_2.2", "a.b", "x/y"}));
  EXPECT_THAT(names_of(files),
              ElementsAre("a.b.pt", "metadata.json", "rng/shard_0.1_2.2.pt", "x/y.pt"));
  const Metadata metadata = parse(files);
  ASSERT_EQ(metadata.objects.size(), 3u);
  for (const StoredObject& object : metadata.objects) {
    const Bytes& item = files.at(metadata.files[object.at.file]);
    EXPECT_EQ(object.at.length, item.size());
    EXPECT_EQ(zarr_format()->parse_object(item), Value("v"));
    EXPECT_FALSE(zarr_format()->verify_object(item));
  }
}

TEST(ZarrFormat, IrregularShardsAreRefusedByKeyAndBox) {
  TensorItem item = tensor_of("a/w", DType::kUInt8, {6}, {6});
  const TensorView whole = item.pieces[0].data;
  item.pieces.clear();
  for (const Box& box : {Box{{0}, {2}}, Box{{2}, {1}}, Box{{3}, {3}}}) {
    item.pieces.push_back({box, whole.narrow(box)});
  }
  const Error on_write = error_of([&] { write(items_of({item})); });
  EXPECT_EQ(on_write.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(on_write.key(), "a/w");
  EXPECT_THAT(on_write.message(), HasSubstr("[0:2]"));
  StoredTensor stored{.key = "a/w", .path = {}, .dtype = DType::kUInt8, .shape = {6}, .chunks = {}};
  for (const Piece& piece : item.pieces) stored.chunks.push_back({piece.box, {}});
  Metadata metadata;
  metadata.tensors.push_back(stored);
  metadata.index();
  const Error in_index = error_of([&] { zarr_format()->encode_index(metadata); });
  EXPECT_EQ(in_index.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(in_index.key(), "a/w");
}

TEST(ZarrFormat, WhatItCantHoldIsRefusedByKeyBeforeAnythingIsWritten) {
  const auto check = [](Items items) { zarr_format()->check(items); };
  for (const DType dtype : {DType::kFloat8E4M3FN, DType::kComplex32, DType::kFloat4E2M1FNX2}) {
    const Error error = error_of([&] { check(items_of({tensor_of("w", dtype, {2}, {2})})); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(error.key(), "w");
    EXPECT_THAT(error.message(), HasSubstr(std::string(to_string(dtype))));
  }
  const auto w = [](const std::string& key, const Dims& shape) {
    return tensor_of(key, DType::kUInt8, shape, Dims(shape.size(), 2));
  };
  const std::pair<Items, std::string> cases[] = {
      {items_of({w("a/../w", {2})}), "a/../w"},
      {items_of({}, {"common"}), "common"},
      {items_of({w("w", {4, 4}), w("w/0.1", {2})}), "w/0.1"},
      {items_of({w("w", {4}), w("w/1/v", {2})}), "w/1/v"},
      {items_of({w("w", Dims()), w("w/0", {2})}), "w/0"},
      {items_of({w("w.pt", {2})}, {"w"}), "w.pt"},
      {items_of({w("w.pt/v", {2})}, {"w"}), "w.pt/v"},
      {items_of({}, {"w", "w.pt/v"}), "w.pt/v"},
      {items_of({w("w", {4})}, {"w/1/v"}), "w/1/v"},
  };
  for (const auto& [items, key] : cases) {
    const Error error = error_of([&] { check(items); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << key;
    EXPECT_EQ(error.key(), key);
  }
  EXPECT_NO_THROW(check(items_of({w("w", {4, 4}), w("w/0", {2}), w("w/0.1.2", {2}), w("a", {2})},
                                 {"a", "w/shard_0_1"})));
}

// Each rank checks only its own keys. All keys of the checkpoint are checked before it is
// published.
TEST(ZarrFormat, ConflictsBetweenKeysOfSeveralRanksAreRefusedWithTheIndex) {
  Metadata metadata;
  for (const char* key : {"w", "w/0.0"}) {
    metadata.tensors.push_back(
        {.key = key, .path = {}, .dtype = DType::kUInt8, .shape = {0, 0}, .chunks = {}});
  }
  metadata.index();
  EXPECT_EQ(error_of([&] { zarr_format()->encode_index(metadata); }).key(), "w/0.0");
}

TEST(ZarrFormat, IndexIsOneFileForEachArrayAndTheSwitchLast) {
  Metadata metadata;
  metadata.tensors.push_back(
      {.key = "w", .path = {}, .dtype = DType::kUInt8, .shape = {0}, .chunks = {}});
  metadata.index();
  const Index index = zarr_format()->encode_index(metadata);
  ASSERT_EQ(index.size(), 2u);
  EXPECT_EQ(index[0].name, "w/.zarray");
  EXPECT_EQ(index[0].role, IndexRole::kBefore);
  EXPECT_EQ(switch_file(index).name, "metadata.json");
}

// A valid checkpoint of one array of 4 x 4 bytes in chunks of 2 x 2.
FileImage sound() { return write(items_of({tensor_of("w", DType::kUInt8, {4, 4}, {2, 2})})); }

void replace(Bytes& text, const std::string& old, const std::string& by) {
  std::string changed(as_text(text));
  changed.replace(changed.find(old), old.size(), by);
  text = to_bytes(changed);
}

TEST(ZarrFormat, FortranOrderIsRead) {
  FileImage files = sound();
  const Bytes wanted = assemble(parse(files), parse(files).tensors[0], files);
  replace(files["w/.zarray"], "\"C\"", "\"F\"");
  for (auto& [name, bytes] : files) {
    if (name.starts_with("w/0") || name.starts_with("w/1")) std::swap(bytes[1], bytes[2]);
  }
  const Metadata metadata = parse(files);
  EXPECT_EQ(assemble(metadata, metadata.tensors[0], files), wanted);
}

TEST(ZarrFormat, ChunksInFoldersAreRead) {
  FileImage files = sound();
  const Bytes wanted = assemble(parse(files), parse(files).tensors[0], files);
  replace(files["w/.zarray"], "{", "{\"dimension_separator\": \"/\", ");
  for (const char* name : {"0.0", "0.1", "1.0", "1.1"}) {
    auto chunk = files.extract(std::string("w/") + name);
    std::replace(chunk.key().begin(), chunk.key().end(), '.', '/');
    files.insert(std::move(chunk));
  }
  const Metadata metadata = parse(files);
  EXPECT_EQ(assemble(metadata, metadata.tensors[0], files), wanted);
  files["w/0/1/2"] = Bytes(1);
  EXPECT_EQ(error_of([&] { parse(files); }).file(), "w/0/1/2");
}

TEST(ZarrFormat, LocksOtherCheckpointsAndUnknownFilesArePassedOver) {
  FileImage files = sound();
  const auto expected = names_of(files).size();
  for (const char* name :
       {"w.sync/.zarray", "w.sync/0.0", "w/.zattrs", "w/notes.txt", "README", "7",
        ".tilestone/id.manifest", ".tilestone/1", "modelopt/metadata.json", "modelopt/common.pt",
        "modelopt/v/.zarray", "modelopt/v/0", "modelopt/o/shard_0_1.pt", "dcp/.metadata", "dcp/0",
        "common.pt", "latest.txt"}) {
    files[name] = Bytes();
  }
  const Metadata metadata = parse(files);
  EXPECT_EQ(metadata.tensors.size(), 1u);
  EXPECT_TRUE(metadata.objects.empty());
  EXPECT_EQ(metadata.files.size() + 2, expected);
}

TEST(ZarrFormat, AKeyThatEndsAsLocksDoIsAKey) {
  const Items items = items_of(
      {tensor_of("w", DType::kUInt8, {4}, {2}), tensor_of("w.sync", DType::kUInt8, {4}, {2})});
  EXPECT_EQ(parse(write(items)).tensors.size(), 2u);
}

TEST(ZarrFormat, AMissingDescriptionOrAChunkOutsideIsCorrupt) {
  const auto corrupt = [](const FileImage& files) {
    const Error error = error_of([&] { parse(files); });
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
    return error.file();
  };
  FileImage files = sound();
  files.erase("w/.zarray");
  EXPECT_EQ(corrupt(files), "w/.zarray");
  files["w/.zarray"] = Bytes();
  EXPECT_EQ(corrupt(files), "w/.zarray");
  files = sound();
  files["w/2.0"] = Bytes(4);
  EXPECT_EQ(corrupt(files), "w/2.0");
  files = sound();
  files["w/0.0.0"] = Bytes(4);
  EXPECT_EQ(corrupt(files), "w/0.0.0");
  files = sound();
  files["v/.zarray"] = files["w/.zarray"];
  files["v/u/0.0"] = Bytes(4);
  EXPECT_EQ(corrupt(files), "v/u/.zarray");
}

TEST(ZarrFormat, AMissingChunkLeavesTheOthersReadable) {
  FileImage files = sound();
  files.erase("w/1.0");
  EXPECT_EQ(parse(files).tensors[0].chunks.size(), 3u);
}

TEST(ZarrFormat, AChunkOfAnotherSizeIsFoundWhenItIsRead) {
  for (const size_t size : {size_t{0}, size_t{3}, size_t{5}}) {
    FileImage files = sound();
    files["w/1.0"].resize(size);
    const Metadata metadata = parse(files);
    const StoredTensor& tensor = metadata.tensors[0];
    const StoredChunk& chunk = tensor.chunks[2];
    EXPECT_EQ(metadata.files[chunk.at.file], "w/1.0");
    const Error error = error_of([&] { zarr_format()->parse_tensor(tensor, chunk, chunk.at, {}); });
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_TRUE(zarr_format()->verify_tensor(tensor, chunk, files["w/1.0"]));
  }
}

TEST(ZarrFormat, OldNamesOfObjectsGetTheNumberThatTheyLack) {
  FileImage files = sound();
  for (const char* name : {"rng/shard_0.0_2.pt", "rng/shard_0.2_2.pt", "rng/shard_1.1_2.pt",
                           "other/shard_0.0.1_2.2.pt", "flat/shard_1_4.pt"}) {
    files[name] = Bytes(8);
  }
  const Metadata metadata = parse(files);
  std::vector<std::string> keys;
  for (const StoredObject& object : metadata.objects) keys.push_back(object.key);
  EXPECT_THAT(keys, ElementsAre("flat/shard_1_4", "other/shard_0.0.1_2.2.2", "rng/shard_0.0_2.3",
                                "rng/shard_0.2_2.3", "rng/shard_1.1_2.3"));
}

TEST(ZarrFormat, ABackendOfAnotherNameOrVersionIsUnsupported) {
  const std::pair<std::string, ErrorCode> cases[] = {
      {"{}", ErrorCode::kCorrupt},
      {"", ErrorCode::kCorrupt},
      {"[1]", ErrorCode::kCorrupt},
      {R"({"sharded_backend": "torch_dist"})", ErrorCode::kUnsupported},
      {R"({"sharded_backend": ["zarr"]})", ErrorCode::kUnsupported},
      {R"({"sharded_backend": "zarr", "sharded_backend_version": 2})", ErrorCode::kUnsupported},
  };
  for (const auto& [text, code] : cases) {
    FileImage files = sound();
    files["metadata.json"] = to_bytes(text);
    const Error error = error_of([&] { parse(files); });
    EXPECT_EQ(error.code(), code) << text;
    EXPECT_EQ(error.file(), "metadata.json");
  }
}

TEST(ZarrFormat, IsDetectedByItsIndex) {
  const auto detect = [](std::vector<std::string> names) { return zarr_format()->detect(names); };
  EXPECT_TRUE(detect({"metadata.json", "w/.zarray", "w/0"}));
  EXPECT_TRUE(detect({"common.pt", "metadata.json", "rng/shard_0_1.pt"}));
  EXPECT_FALSE(detect({"w/.zarray", "w/0"}));
  EXPECT_FALSE(detect({".metadata", "__0_0.distcp", "common.pt", "metadata.json"}));
  EXPECT_FALSE(detect({"metadata.json", "model.safetensors"}));
  const std::vector<std::string> none{"w/.zarray"};
  EXPECT_EQ(error_of([&] { zarr_format()->index_files(none); }).code(), ErrorCode::kNotFound);
}

}  // namespace tilestone::zarr::zarr_test
