#include "tilestone/format/manifest.h"

#include <gtest/gtest.h>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error_testing.h"
#include "tilestone/base/named_fields.h"

namespace tilestone::manifest_test {

// Two ranks, each with a chunk of one tensor. Rank 0 also has an object.
Manifest example() {
  Manifest manifest;
  manifest.save_id = "a1";
  manifest.world_size = 2;
  manifest.format = "torch_dist";
  manifest.writer = "Tilestone 0.1.0";
  manifest.dialect = "pytorch";
  manifest.index = {{".metadata", 320, 77, IndexRole::kSwitch}};
  for (int rank = 0; rank < 2; ++rank) {
    Receipt receipt;
    receipt.rank = rank;
    receipt.world_size = 2;
    receipt.save_id = "a1";
    receipt.files = {{"a1__" + std::to_string(rank) + "_0.distcp", 4096}};
    receipt.tensors = {{"w", {std::string("w")}, DType::kFloat32, {4, 4}}};
    receipt.chunks = {{0, {{2 * rank, 0}, {2, 4}}, {0, 64, 900, {448, 1u + rank, 3u + rank}}}};
    if (rank == 0) receipt.objects = {{"lr", {std::string("lr")}, {0, 1024, 500, {0, 0, 9}}}};
    manifest.receipts.push_back(std::move(receipt));
  }
  return manifest;
}

Metadata metadata_of(const Manifest& manifest) { return merge_receipts(manifest.receipts); }

void forget_checksums(Metadata& metadata) {
  for (StoredTensor& tensor : metadata.tensors) {
    for (StoredChunk& chunk : tensor.chunks) chunk.at.checksums.reset();
  }
  for (StoredObject& object : metadata.objects) object.at.checksums.reset();
}

TEST(Manifest, WhatIsWrittenReadsBack) {
  const Bytes bytes = example().encode();
  EXPECT_EQ(example().encode(), bytes);
  const Manifest found = Manifest::decode(bytes, "m");
  EXPECT_EQ(found.encode(), bytes);
  EXPECT_EQ(found.save_id, "a1");
  EXPECT_EQ(found.writer, "Tilestone 0.1.0");
  EXPECT_EQ(found.dialect, "pytorch");
  EXPECT_EQ(found.index, example().index);
  EXPECT_EQ(found.receipts.size(), 2u);
}

TEST(Manifest, ReceiptsThatAreEncodedAlreadyAreTakenAsTheyAre) {
  Manifest manifest = example();
  const Bytes bytes = manifest.encode();
  const std::vector<Bytes> encoded = {manifest.receipts[0].encode(), manifest.receipts[1].encode()};
  manifest.receipts.clear();
  EXPECT_EQ(manifest.encode(encoded), bytes);
}

TEST(Manifest, EveryFlippedBitAndTruncationIsFound) {
  const Bytes whole = example().encode();
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    Bytes damaged = whole;
    damaged[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    EXPECT_THROW(Manifest::decode(damaged, "m"), Error) << bit;
  }
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(Manifest::decode(ByteView(whole).first(size), "m"), Error) << size;
  }
}

TEST(Manifest, AttributesAndHostsAreOptional) {
  Manifest manifest = example();
  manifest.attributes = {{"iteration", "100"}, {"job", ""}};
  manifest.receipts[1].host = "node1";
  const Manifest found = Manifest::decode(manifest.encode(), "m");
  EXPECT_EQ(found.attributes, manifest.attributes);
  EXPECT_EQ(found.receipts[0].host, "");
  EXPECT_EQ(found.receipts[1].host, "node1");
  EXPECT_TRUE(Manifest::decode(example().encode(), "m").attributes.empty());
}

// The example in version 2: it has no table, and one checksum of everything at the end.
Bytes version_2(const Manifest& manifest, ByteView optional_fields) {
  ByteWriter out;
  out.raw(as_bytes("TILEMAN\n"));
  out.u32(2);
  out.string(manifest.save_id);
  out.varint(static_cast<uint64_t>(manifest.world_size));
  for (const std::string* text : {&manifest.format, &manifest.dialect, &manifest.writer}) {
    out.string(*text);
  }
  out.varint(manifest.index.size());
  for (const IndexSum& sum : manifest.index) {
    out.string(sum.name);
    out.u64(sum.size);
    out.u64(sum.xxh3);
    out.u8(static_cast<uint8_t>(sum.role));
  }
  out.varint(manifest.receipts.size());
  for (const Receipt& receipt : manifest.receipts) out.blob(receipt.encode());
  out.raw(optional_fields);
  out.u64(xxh3_64(out.bytes()));
  return std::move(out).take();
}

uint64_t head_bytes_of(const Bytes& manifest) {
  ByteReader reader(ByteView(manifest).subspan(12), "manifest");
  return reader.u64();
}

// A manifest with extra bytes at the end of its head. The head's checksum and size are adapted.
Bytes with_tail(const Bytes& manifest, ByteView tail) {
  const uint64_t head = head_bytes_of(manifest);
  Bytes bytes(manifest.begin(), manifest.begin() + static_cast<ptrdiff_t>(head - 8));
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  const uint64_t size = head + tail.size();
  for (size_t i = 0; i < sizeof size; ++i) bytes[12 + i] = static_cast<std::byte>(size >> 8 * i);
  ByteWriter out;
  out.raw(bytes);
  out.u64(xxh3_64(bytes));
  out.raw(ByteView(manifest).subspan(head));
  return std::move(out).take();
}

TEST(Manifest, OneOfVersion2OpensAndOtherVersionsAreRefused) {
  ByteWriter attributes, tail;
  attributes.varint(1);
  for (const char* text : {"iteration", "7"}) attributes.string(text);
  write_named_fields(tail, {{"attributes", attributes.bytes()}});
  const Manifest found = Manifest::decode(version_2(example(), tail.bytes()), "m");
  Manifest expected = example();
  expected.attributes = {{"iteration", "7"}};
  EXPECT_EQ(found.encode(), expected.encode());
  for (const uint8_t version : {uint8_t{1}, uint8_t{4}}) {
    Bytes bytes = example().encode();
    bytes[8] = static_cast<std::byte>(version);
    EXPECT_EQ(error_of([&] { Manifest::decode(bytes, "m"); }).code(), ErrorCode::kUnsupported);
  }
  Bytes damaged = version_2(example(), {});
  damaged[40] ^= std::byte{1};
  EXPECT_EQ(error_of([&] { Manifest::decode(damaged, "m"); }).code(), ErrorCode::kCorrupt);
}

TEST(Manifest, OptionalFieldsOfLaterVersionsAreSkipped) {
  ByteWriter tail;
  write_named_fields(tail, {{"later", to_bytes("x")}});
  EXPECT_EQ(Manifest::decode(with_tail(example().encode(), tail.bytes()), "m").save_id, "a1");
  ByteWriter twice;  // has one attribute twice
  ByteWriter attributes;
  attributes.varint(2);
  for (const char* text : {"a", "1", "a", "2"}) attributes.string(text);
  write_named_fields(twice, {{"attributes", attributes.bytes()}});
  EXPECT_THROW(Manifest::decode(with_tail(example().encode(), twice.bytes()), "m"), Error);
}

TEST(Manifest, ErrorsNameTheFile) {
  try {
    Manifest::decode(Bytes(100), "x.manifest");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_EQ(error.file(), "x.manifest");
  }
}

TEST(Manifest, ReceiptsOfAnotherSaveOrRankAreRefused) {
  const auto check = [](void (*change)(Manifest&)) {
    Manifest manifest = example();
    change(manifest);
    EXPECT_THROW(Manifest::decode(manifest.encode(), "m"), Error);
  };
  check([](Manifest& m) { m.receipts[1].save_id = "b2"; });
  check([](Manifest& m) { std::swap(m.receipts[0], m.receipts[1]); });
  check([](Manifest& m) { m.receipts[1].world_size = 3; });
  check([](Manifest& m) { m.receipts.pop_back(); });
  check([](Manifest& m) { m.world_size = 3; });
}

TEST(Manifest, OnlyASaveIdThatIsAFilesNameHasOne) {
  EXPECT_TRUE(may_have_manifest("a1"));
  for (const std::string& id :
       {std::string(), std::string("../a1"), std::string("a/b"), std::string(".."),
        std::string("a\0b", 3), std::string(100'000, 'a')}) {
    EXPECT_FALSE(may_have_manifest(id)) << id.size();
  }
}

TEST(Manifest, AFileOfTheIndexThatIsMissingOrChangedIsNamed) {
  const Index index = {{"before", to_bytes("b"), IndexRole::kBefore},
                       {"switch", to_bytes("s"), IndexRole::kSwitch},
                       {"after", to_bytes("a"), IndexRole::kAfter}};
  Manifest manifest = example();
  manifest.index = sums_of(index);
  DirectoryFiles whole;
  for (const IndexFile& file : index) whole.contents.emplace(file.name, file.bytes);
  check_index(manifest, whole);
  for (const IndexFile& file : index) {
    DirectoryFiles changed = whole;
    changed.contents[file.name] = to_bytes("x");
    DirectoryFiles missing = whole;
    missing.contents.erase(file.name);
    for (const DirectoryFiles& damaged : {changed, missing}) {
      if (file.role == IndexRole::kAfter && !damaged.contents.contains(file.name)) {
        check_index(manifest, damaged);  // a crash before it was published
        continue;
      }
      try {
        check_index(manifest, damaged);
        ADD_FAILURE() << file.name;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
        EXPECT_EQ(error.file(), file.name);
      }
    }
  }
}

TEST(Manifest, ChecksumsComeToTheirItems) {
  Metadata metadata = metadata_of(example());
  forget_checksums(metadata);
  attach_manifest(metadata, example());
  EXPECT_EQ(metadata.tensors[0].chunks[1].at.checksums, (ItemChecksums{448, 2, 4}));
  EXPECT_EQ(metadata.objects[0].at.checksums, (ItemChecksums{0, 0, 9}));
  EXPECT_EQ(metadata.writer, "Tilestone 0.1.0");
}

// The example with a copy of rank 0's chunk in another file of rank 1, which no index names.
Manifest with_copy() {
  Manifest manifest = example();
  Receipt& receipt = manifest.receipts[1];
  receipt.files.push_back({"a1__1_1.distcp", 2048});
  receipt.copies = {{0, {{0, 0}, {2, 4}}, {1, 128, 900, {448, 1, 9}}}};
  return manifest;
}

TEST(Manifest, CopiesComeWithTheirFilesAndOutsideTheIndexsItems) {
  Metadata metadata = metadata_of(example());
  attach_manifest(metadata, with_copy());
  EXPECT_EQ(metadata.find_tensor("w")->chunks.size(), 2u);
  ASSERT_EQ(metadata.copies.size(), 1u);
  const StoredCopy& copy = metadata.copies[0];
  EXPECT_EQ(metadata.tensors[copy.tensor].chunks[copy.chunk].box, (Box{{0, 0}, {2, 4}}));
  EXPECT_EQ(metadata.files.at(copy.at.file), "a1__1_1.distcp");
  EXPECT_EQ(copy.at.offset, 128u);
  EXPECT_EQ(copy.at.checksums, (ItemChecksums{448, 1, 9}));
}

TEST(Manifest, ACopyOfNoChunkAndAnIndexThatNamesACopyAreContradictions) {
  Manifest manifest = with_copy();
  manifest.receipts[1].copies[0].box = {{1, 0}, {2, 4}};
  Metadata metadata = metadata_of(example());
  Error error = error_of([&] { attach_manifest(metadata, manifest); });
  EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
  EXPECT_EQ(error.key(), "w");
  EXPECT_EQ(error.file(), "a1__1_1.distcp");

  metadata = metadata_of(example());
  metadata.files.push_back("a1__1_1.distcp");
  metadata.tensors[0].chunks[0].at.file = 2;
  metadata.tensors[0].chunks[0].at.offset = 128;
  error = error_of([&] { attach_manifest(metadata, with_copy()); });
  EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
}

TEST(Manifest, AttributesAndPathsThatTheIndexLacksComeFromTheReceipts) {
  Manifest manifest = example();
  manifest.receipts[1].attributes[0] = {{"kind", "glu"}};
  Metadata metadata = metadata_of(example());
  metadata.tensors[0].path.clear();
  metadata.objects[0].path.clear();
  attach_manifest(metadata, manifest);
  EXPECT_EQ(metadata.attributes.at("w"), (Attributes{{"kind", "glu"}}));
  EXPECT_EQ(metadata.tensors[0].path, Path{std::string("w")});
  EXPECT_EQ(metadata.objects[0].path, Path{std::string("lr")});

  metadata = metadata_of(example());
  metadata.tensors[0].path.clear();  // the index records paths, and the key has none
  attach_manifest(metadata, manifest);
  EXPECT_TRUE(metadata.tensors[0].path.empty());
}

TEST(Manifest, ContradictionsWithTheMetadataAreRefused) {
  const auto check = [](void (*change)(Metadata&)) {
    Metadata metadata = metadata_of(example());
    change(metadata);
    try {
      attach_manifest(metadata, example());
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    }
  };
  check([](Metadata& m) { m.tensors[0].chunks[0].at.offset += 64; });
  check([](Metadata& m) { m.tensors[0].chunks[0].at.length += 1; });
  check([](Metadata& m) { m.tensors[0].chunks[0].box.shape[1] = 3; });
  check([](Metadata& m) { m.tensors[0].key = "v"; });
  check([](Metadata& m) { m.files[0] = "other"; });
  check([](Metadata& m) { m.objects.clear(); });
  check([](Metadata& m) { m.objects[0].at = m.tensors[0].chunks[0].at; });
}

}  // namespace tilestone::manifest_test
