// Tests that `.metadata` is written and read, that several ranks' files are merged, and that
// damaged and hostile files are refused.
#include <gtest/gtest.h>
#include <zstd.h>

#include <functional>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/torch_dist/checkpoint_testing.h"
#include "tilestone/format/torch_dist/metadata_reader_internal.h"
#include "tilestone/format/torch_dist/metadata_writer_internal.h"
#include "tilestone/format/torch_dist/torch_dist.h"

namespace tilestone::torch_dist::metadata_test {

// Two chunks of a matrix in two files, a scalar, an empty tensor, and an object.
Metadata example() {
  Metadata metadata;
  metadata.files = {"a__0_0.distcp", "a__1_0.distcp"};
  metadata.save_id = "a";
  metadata.writer = "PyTorch (torch_dist 1.0.0)";
  StoredTensor matrix{"m.w", {std::string("m"), std::string("w")}, DType::kBFloat16, {4, 6}, {}};
  matrix.chunks.push_back({{{0, 0}, {2, 6}}, {0, Codec::kNone, 64, 900, {}}});
  matrix.chunks.push_back({{{2, 0}, {2, 6}}, {1, Codec::kZstd, uint64_t{5} << 32, 900, {}}});
  metadata.tensors.push_back(matrix);
  metadata.tensors.push_back({"s", {}, DType::kFloat64, {}, {{{{}, {}}, {1, {}, 2048, 700, {}}}}});
  metadata.tensors.push_back({"none", {std::string("none")}, DType::kInt8, {0, 5}, {}});
  metadata.objects.push_back({"l.0", {std::string("l"), int64_t{0}}, {0, {}, 4096, 500, {}}});
  metadata.index();
  return metadata;
}

bool same(const ItemLocation& a, const Metadata& of_a, const ItemLocation& b,
          const Metadata& of_b) {
  return of_a.files[a.file] == of_b.files[b.file] && a.codec == b.codec && a.offset == b.offset &&
         a.length == b.length;
}

void expect_equal(const Metadata& a, const Metadata& b) {
  EXPECT_EQ(a.save_id, b.save_id);
  EXPECT_EQ(a.writer, b.writer);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const StoredTensor& x = a.tensors[i];
    const StoredTensor& y = b.tensors[i];
    EXPECT_EQ(x.key, y.key);
    EXPECT_EQ(x.path, y.path);
    EXPECT_EQ(x.dtype, y.dtype);
    EXPECT_EQ(x.shape, y.shape);
    ASSERT_EQ(x.chunks.size(), y.chunks.size());
    for (size_t c = 0; c < x.chunks.size(); ++c) {
      EXPECT_EQ(x.chunks[c].box, y.chunks[c].box);
      EXPECT_TRUE(same(x.chunks[c].at, a, y.chunks[c].at, b));
    }
  }
  ASSERT_EQ(a.objects.size(), b.objects.size());
  for (size_t i = 0; i < a.objects.size(); ++i) {
    EXPECT_EQ(a.objects[i].key, b.objects[i].key);
    EXPECT_EQ(a.objects[i].path, b.objects[i].path);
    EXPECT_TRUE(same(a.objects[i].at, a, b.objects[i].at, b));
  }
}

Metadata read(ByteView bytes) {
  Metadata metadata = parse_metadata(bytes);
  metadata.index();
  return metadata;
}

// The error that reading `bytes` throws; kInternal if there is none.
ErrorCode refusal(const Bytes& bytes, std::string* key = nullptr) {
  try {
    read(bytes);
  } catch (const Error& error) {
    if (key != nullptr) *key = error.key();
    return error.code();
  }
  return ErrorCode::kInternal;
}

ErrorCode refusal(const std::function<void(Metadata&)>& change, std::string* key = nullptr) {
  Metadata metadata = example();
  change(metadata);
  return refusal(write_metadata(metadata), key);
}

StoredTensor& matrix_of(Metadata& metadata) {
  for (StoredTensor& tensor : metadata.tensors) {
    if (tensor.key == "m.w") return tensor;
  }
  throw Error(ErrorCode::kInternal, "no matrix");
}

TEST(TorchMetadata, WhatIsWrittenReadsBack) {
  const Bytes bytes = write_metadata(example());
  expect_equal(read(bytes), example());
  EXPECT_EQ(write_metadata(example()), bytes);
}

TEST(TorchMetadata, ManyChunksAreWrittenInBatches) {
  Metadata metadata;
  metadata.files = {"f"};
  metadata.writer = "PyTorch (torch_dist 1.0.0)";
  StoredTensor tensor{"t", {}, DType::kFloat32, {2500, 3}, {}};
  for (int64_t i = 0; i < 2500; ++i) {
    tensor.chunks.push_back(
        {{{i, 0}, {1, 3}}, {0, Codec::kNone, static_cast<uint64_t>(i) * 1024, 900, {}}});
  }
  metadata.tensors.push_back(tensor);
  expect_equal(read(write_metadata(metadata)), metadata);
}

TEST(TorchMetadata, TruncationAtEveryLengthIsRefused) {
  const Bytes whole = write_metadata(example());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_EQ(refusal(Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size))),
              ErrorCode::kCorrupt)
        << size;
  }
}

TEST(TorchMetadata, FlippedBitsNeverEscapeTheTypedErrors) {
  const Bytes whole = write_metadata(example());
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    Bytes damaged = whole;
    damaged[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    refusal(damaged);
  }
}

TEST(TorchMetadata, NamesThatLeaveTheDirectoryAreUnsafe) {
  for (const char* name : {"../x", "/etc/passwd", "a/../../x", "", "."}) {
    std::string key;
    EXPECT_EQ(refusal([&](Metadata& m) { m.files[0] = name; }, &key), ErrorCode::kUnsafe) << name;
    EXPECT_FALSE(key.empty());
  }
}

TEST(TorchMetadata, ImpossibleShapesAndBoxesAreRefusedWithTheKey) {
  const auto check = [](const std::function<void(StoredTensor&)>& change) {
    std::string key;
    EXPECT_EQ(refusal([&](Metadata& m) { change(matrix_of(m)); }, &key), ErrorCode::kCorrupt);
    EXPECT_EQ(key, "m.w");
  };
  check([](StoredTensor& t) { t.shape = {INT64_MAX, INT64_MAX}; });
  check([](StoredTensor& t) { t.shape = {INT64_MAX, 1}; });  // bytes overflow, elements don't
  check([](StoredTensor& t) { t.shape = {-4, 6}; });
  check([](StoredTensor& t) { t.shape = {4}; });
  check([](StoredTensor& t) { t.chunks[0].box.offset = {3, 0}; });
  check([](StoredTensor& t) { t.chunks[0].box.offset = {INT64_MAX, 0}; });
  check([](StoredTensor& t) { t.chunks[0].box.shape = {-2, 6}; });
  check([](StoredTensor& t) { t.chunks[0].box = {{0}, {2}}; });
}

TEST(TorchMetadata, AnotherPickleIsNoMetadata) {
  const std::string call = "cos\nsystem\nX\x02" + std::string(3, '\0') + "ls\x85R";
  const std::string unknown = "cnewer\nMetadata\n)\x81";
  for (const std::string text : {"K\x07", "N", "]", "}", "K\x07\x85"}) {
    EXPECT_EQ(refusal(to_bytes("\x80\x02" + text + ".")), ErrorCode::kCorrupt) << text;
  }
  EXPECT_EQ(refusal(to_bytes("\x80\x02" + unknown + ".")), ErrorCode::kUnsupported);
  EXPECT_EQ(refusal(to_bytes("\x80\x02" + call + ".")), ErrorCode::kUnsafe);
  EXPECT_EQ(refusal(to_bytes("\x80\x02" + call + "\x85.")), ErrorCode::kUnsafe);     // in a tuple
  EXPECT_EQ(refusal(to_bytes("\x80\x02}K\x01" + call + "s.")), ErrorCode::kUnsafe);  // in a dict
  EXPECT_EQ(refusal(to_bytes("\x80\x02" + unknown + "}K\x01" + call + "sb.")),
            ErrorCode::kUnsafe);  // in the state of an object
}

TEST(TorchMetadata, AnEmptyChunkAtAFullOnesOffsetTakesNothingFromIt) {
  // torch has one location for both, under (key, offset).
  Metadata metadata = example();
  StoredTensor& tensor = matrix_of(metadata);
  Bytes bytes = write_metadata(metadata);
  Metadata with_empty = example();
  StoredTensor& changed = matrix_of(with_empty);
  changed.chunks.insert(changed.chunks.begin(), {{{2, 0}, {0, 6}}, tensor.chunks[1].at});
  const Metadata found = read(write_metadata(with_empty));
  const StoredTensor* matrix = found.find_tensor("m.w");
  ASSERT_EQ(matrix->chunks.size(), 3u);
  EXPECT_EQ(matrix->chunks[2].box, (Box{{2, 0}, {2, 6}}));
  EXPECT_EQ(matrix->chunks[2].at.length, 900u);
}

// ---- Rank-local checkpoints ----

Metadata rank(int n) {
  Metadata metadata;
  metadata.files = {"__" + std::to_string(n) + "_0.distcp"};
  StoredTensor tensor{"t", {}, DType::kFloat32, {4}, {}};
  tensor.chunks.push_back({{{2 * n}, {2}}, {0, Codec::kNone, 0, 800, {}}});
  metadata.tensors.push_back(tensor);
  metadata.objects.push_back({"o", {}, {0, Codec::kNone, 1024, 300, {}}});
  return metadata;
}

FileImage rank_local_files(int ranks) {
  FileImage files;
  for (int n = 0; n < ranks; ++n) {
    files.emplace("__" + std::to_string(n) + ".metadata", write_metadata(rank(n)));
  }
  return files;
}

TEST(RankLocal, TheRanksFilesAreReadAsOne) {
  const auto format = torch_dist_format();
  const Metadata metadata = parse(*format, rank_local_files(2));
  EXPECT_TRUE(metadata.rank_local);
  EXPECT_EQ(metadata.files.size(), 2u);
  ASSERT_EQ(metadata.tensors.size(), 1u);
  EXPECT_EQ(metadata.tensors[0].chunks.size(), 2u);
  EXPECT_EQ(metadata.tensors[0].chunks[1].at.file, 1u);
  ASSERT_EQ(metadata.objects.size(), 1u);
  EXPECT_EQ(metadata.objects[0].at.file, 0u);
}

void expect_refused(const FileImage& files, const std::string& part) {
  try {
    parse(*torch_dist_format(), files);
    ADD_FAILURE() << "read, expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(RankLocal, AMissingRankIsNamed) {
  FileImage files = rank_local_files(3);
  files.erase("__1.metadata");
  expect_refused(files, "__1.metadata");
}

TEST(RankLocal, RanksThatDisagreeAreRefusedWithTheKey) {
  FileImage files = rank_local_files(2);
  Metadata other = rank(1);
  other.tensors[0].dtype = DType::kFloat16;
  files["__1.metadata"] = write_metadata(other);
  expect_refused(files, "key t");
}

TEST(RankLocal, ADirectoryOfBothModesIsRefused) {
  FileImage files = rank_local_files(1);
  files.emplace(".metadata", write_metadata(example()));
  expect_refused(files, "__0.metadata");
  EXPECT_EQ(torch_dist_format()->index_files(directory_of(files).names),
            (std::vector<std::string>{"__0.metadata", ".metadata"}));
}

TEST(RankLocal, OtherNamesAreNoMetadataFiles) {
  const auto format = torch_dist_format();
  for (const char* name : {"__.metadata", "__0_0.metadata", "__00.metadata", "__-1.metadata"}) {
    EXPECT_FALSE(format->detect(std::vector{std::string(name)})) << name;
  }
  EXPECT_TRUE(format->detect(directory_of(rank_local_files(1)).names));
}

// ---- Compressed items ----

TEST(Zstd, AStreamIsUndoneWithinItsBound) {
  const Bytes plain = write_torch_archive(Value(std::string(100'000, 'x')));
  Bytes packed(ZSTD_compressBound(plain.size()));
  packed.resize(ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), 3));
  const auto format = torch_dist_format();
  EXPECT_EQ(format->decode(Codec::kZstd, packed, plain.size()), plain);
  EXPECT_THROW(format->decode(Codec::kZstd, packed, plain.size() - 1), Error);
  for (size_t size = 0; size < packed.size(); ++size) {
    EXPECT_THROW(format->decode(Codec::kZstd, ByteView(packed).first(size), 1u << 20), Error);
  }
}

}  // namespace tilestone::torch_dist::metadata_test
