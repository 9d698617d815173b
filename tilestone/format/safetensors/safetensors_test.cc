#include "tilestone/format/safetensors/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tilestone/base/error.h"
#include "tilestone/base/file_image.h"
#include "tilestone/format/format_testing.h"
#include "tilestone/format/safetensors/header_internal.h"

namespace tilestone::safetensors::safetensors_test {

using testing::ElementsAre;
using testing::HasSubstr;

Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::kInternal, "nothing was thrown");
}

// A directory with these files, as the engine reads it for the format.
DirectoryFiles directory_of(const FileImage& files) {
  const auto format = safetensors_format();
  DirectoryFiles directory;
  for (const auto& [name, bytes] : files) directory.names.push_back(name);
  for (const std::string& name : format->index_files(directory.names)) {
    directory.contents.emplace(name, files.at(name));
  }
  for (const std::string& name : format->self_describing_files(directory.names)) {
    FileParts read{files.at(name).size(), {}};
    while (const auto next = format->next_part(name, read)) {
      const ByteView part = ByteView(files.at(name)).subspan(next->offset, next->size);
      read.parts.emplace(next->offset, Bytes(part.begin(), part.end()));
    }
    directory.parts.emplace(name, std::move(read));
  }
  return directory;
}

Metadata parse(const FileImage& files) {
  return safetensors_format()->parse_index(directory_of(files));
}

std::vector<std::string> keys_of(const Metadata& metadata) {
  std::vector<std::string> keys;
  for (const StoredTensor& tensor : metadata.tensors) keys.push_back(tensor.key);
  return keys;
}

// A file with these tensors of bytes; each has as many elements as its number says.
Bytes file_of(const std::vector<std::pair<std::string, int64_t>>& tensors) {
  std::vector<HeaderTensor> header;
  int64_t elements = 0;
  for (const auto& [key, size] : tensors) {
    header.push_back({.key = key, .dtype = DType::kUInt8, .shape = {size}});
    elements += size;
  }
  Bytes bytes = write_header(header);
  bytes.resize(bytes.size() + static_cast<size_t>(elements), std::byte{7});
  return bytes;
}

Bytes index_of(const std::string& entries) {
  return to_bytes(R"({"metadata":{},"weight_map":{)" + entries + "}}");
}

TEST(Safetensors, AFileOfAnyNameIsRead) {
  const Bytes file = file_of({{"b", 2}, {"a", 3}, {"e", 0}});
  const Metadata metadata = parse({{"adapter.safetensors", file}});
  EXPECT_THAT(keys_of(metadata), ElementsAre("a", "b", "e"));
  const ItemLocation& at = metadata.tensors[0].chunks[0].at;
  EXPECT_EQ(at.length, 3u);
  EXPECT_EQ(at.offset + at.length, file.size());
  EXPECT_TRUE(metadata.tensors[2].chunks.empty());
}

TEST(Safetensors, AFolderIsReadByItsIndex) {
  const FileImage files{
      {"model.safetensors.index.json",
       index_of(R"("a":"x.safetensors","b":"y.safetensors","both":"y.safetensors")")},
      {"x.safetensors", file_of({{"a", 1}, {"both", 2}})},
      {"y.safetensors", file_of({{"b", 1}, {"both", 3}, {"unlisted", 1}})},
      {"consolidated.safetensors", file_of({{"other", 1}})},
      {"config.json", Bytes()}};
  const Metadata metadata = parse(files);
  EXPECT_THAT(keys_of(metadata), ElementsAre("a", "b", "both", "unlisted"));
  EXPECT_EQ(metadata.find_tensor("both")->shape, (Dims{3}));
}

TEST(Safetensors, WithoutAnIndexAllFilesCountUnlessTheyContradictOneAnother) {
  FileImage files{{"x.safetensors", file_of({{"a", 1}})}, {"y.safetensors", file_of({{"b", 1}})}};
  EXPECT_THAT(keys_of(parse(files)), ElementsAre("a", "b"));
  files["z.safetensors"] = file_of({{"a", 2}});
  const Error error = error_of([&] { parse(files); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_EQ(error.key(), "a");
  EXPECT_EQ(error.file(), "z.safetensors");
}

TEST(Safetensors, WhatTheIndexNamesMustExist) {
  FileImage files{
      {"model.safetensors.index.json", index_of(R"("a":"x.safetensors","b":"y.safetensors")")},
      {"x.safetensors", file_of({{"a", 1}})}};
  Error error = error_of([&] { parse(files); });
  EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
  EXPECT_EQ(error.file(), "y.safetensors");
  files["y.safetensors"] = file_of({{"c", 1}});
  error = error_of([&] { parse(files); });
  EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
  EXPECT_EQ(error.key(), "b");
  EXPECT_EQ(error.file(), "y.safetensors");
}

TEST(Safetensors, OfSeveralIndexesHuggingFacesCounts) {
  FileImage files{{"a.safetensors.index.json", index_of(R"("a":"x.safetensors")")},
                  {"b.safetensors.index.json", index_of(R"("b":"y.safetensors")")},
                  {"x.safetensors", file_of({{"a", 1}})},
                  {"y.safetensors", file_of({{"b", 1}})}};
  EXPECT_EQ(error_of([&] { parse(files); }).code(), ErrorCode::kUnsupported);
  files["model.safetensors.index.json"] = index_of(R"("b":"y.safetensors")");
  EXPECT_THAT(keys_of(parse(files)), ElementsAre("b"));
}

TEST(Safetensors, AFileThatIsCutAnywhereIsCorruptAndNamed) {
  const Bytes whole = file_of({{"a", 5}, {"b", 3}});
  for (size_t size = 0; size < whole.size(); ++size) {
    FileImage files{
        {"x.safetensors", Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size))}};
    const Error error = error_of([&] { parse(files); });
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << size;
    EXPECT_EQ(error.file(), "x.safetensors") << size;
  }
}

TEST(Safetensors, IsDetectedByFilesAtTheTop) {
  const auto detect = [](std::vector<std::string> names) {
    return safetensors_format()->detect(names);
  };
  EXPECT_TRUE(detect({"config.json", "x.safetensors"}));
  EXPECT_TRUE(detect({"model.safetensors.index.json"}));
  EXPECT_FALSE(detect({"sub/x.safetensors"}));
  EXPECT_FALSE(detect({"config.json"}));
}

TensorItem item_of(const std::string& key, DType dtype, const Dims& shape) {
  TensorItem item;
  item.key = key;
  item.dtype = dtype;
  item.global_shape = shape;
  item.pieces.push_back({Box::whole(shape), TensorView::allocate(dtype, shape)});
  for (uint64_t i = 0; i < item.pieces[0].data.bytes(); ++i) {
    item.pieces[0].data.data[i] = static_cast<std::byte>(i);
  }
  return item;
}

TEST(SafetensorsWriter, WhatIsWrittenIsReadBack) {
  const std::vector<TensorItem> items = {item_of("f", DType::kFloat32, {2, 3}),
                                         item_of("q", DType::kFloat4E2M1FNX2, {2, 2}),
                                         item_of("e", DType::kFloat8E4M3FN, {0, 4})};
  const auto writer = safetensors_writer({.files = {{"f", "x"}, {"q", "x"}, {"e", "x"}}});
  std::vector<FileItem> planned;
  for (const TensorItem& item : items) planned.push_back({&item, &item.pieces[0], nullptr});
  const auto encoder = writer->encoder();
  Bytes bytes = encoder->begin_file(planned);
  for (const TensorItem& item : items) {
    const Bytes more = render(encoder->tensor(item, item.pieces[0], bytes.size()));
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  const Metadata metadata = parse({{"x.safetensors", bytes}});
  for (const TensorItem& item : items) {
    const StoredTensor& stored = *metadata.find_tensor(item.key);
    EXPECT_EQ(stored.dtype, item.dtype);
    EXPECT_EQ(stored.shape, item.global_shape);
    if (stored.chunks.empty()) continue;
    const ItemLocation& at = stored.chunks[0].at;
    const ByteView data = ByteView(bytes).subspan(at.offset, at.length);
    const TensorView& source = item.pieces[0].data;
    EXPECT_TRUE(std::equal(data.begin(), data.end(), source.data, source.data + source.bytes()));
  }
}

TEST(SafetensorsWriter, WhatSafetensorsLacksIsRefusedByKey) {
  const auto writer =
      safetensors_writer({.files = {{"k", "x"}, {"__metadata__", "x"}, {"\xff", "x"}}});
  const auto refused = [&](TensorItem item) {
    Items items;
    items.tensors.push_back(std::move(item));
    const std::string key = items.tensors[0].key;
    const Error error = error_of([&] { writer->check(items); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << key;
    EXPECT_EQ(error.key(), key);
  };
  refused(item_of("k", DType::kComplex128, {1}));
  refused(item_of("k", DType::kComplex32, {1}));
  refused(item_of("k", DType::kFloat4E2M1FNX2, {}));
  refused(item_of("__metadata__", DType::kUInt8, {1}));
  refused(item_of("\xff", DType::kUInt8, {1}));
  TensorItem part = item_of("k", DType::kUInt8, {1});
  part.global_shape = {2};
  refused(part);
  Items items;
  items.objects.push_back({.key = "o", .path = {}, .value = {}, .replica_id = {}});
  EXPECT_EQ(error_of([&] { writer->check(items); }).key(), "o");
  EXPECT_EQ(error_of([&] { safetensors_format()->check({}); }).code(), ErrorCode::kUnsupported);
}

TEST(SafetensorsFiles, AreFilledInOrder) {
  const auto one = safetensors_files({{"a", 5}, {"b", 5}}, 10);
  EXPECT_EQ(one.at("b"), "model.safetensors");
  const auto more = safetensors_files({{"a", 5}, {"b", 6}, {"huge", 99}, {"c", 0}}, 10);
  EXPECT_EQ(more.at("a"), "model-00001-of-00003.safetensors");
  EXPECT_EQ(more.at("b"), "model-00002-of-00003.safetensors");
  EXPECT_EQ(more.at("huge"), "model-00003-of-00003.safetensors");
  EXPECT_EQ(more.at("c"), "model-00003-of-00003.safetensors");
}

TEST(SafetensorsFolder, NotesFilesThatItsIndexDoesNotNameAndKeysOfTwoFiles) {
  const Bytes index = index_of(R"("a":"x.safetensors","b":"y.safetensors")");
  const Metadata metadata = parse({{"m.safetensors.index.json", index},
                                   {"other.safetensors", file_of({{"o", 1}})},
                                   {"x.safetensors", file_of({{"a", 1}, {"b", 1}})},
                                   {"y.safetensors", file_of({{"b", 2}})}});
  EXPECT_THAT(keys_of(metadata), ElementsAre("a", "b"));
  EXPECT_THAT(metadata.notes, testing::UnorderedElementsAre(HasSubstr("x.safetensors also has 1"),
                                                            HasSubstr("other.safetensors is not")));
}

TEST(SafetensorsFolder, AnEmptyIndexBesideTensorsIsRefused) {
  const Bytes index = index_of("");
  EXPECT_TRUE(parse({{"m.safetensors.index.json", index}}).tensors.empty());
  const Error error = error_of([&] {
    parse({{"m.safetensors.index.json", index}, {"x.safetensors", file_of({{"a", 1}})}});
  });
  EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
  EXPECT_EQ(error.file(), "m.safetensors.index.json");
}

}  // namespace tilestone::safetensors::safetensors_test
