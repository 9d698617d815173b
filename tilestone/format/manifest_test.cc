#include "tilestone/format/manifest.h"

#include <gtest/gtest.h>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/named_fields.h"

namespace tilestone {
namespace {

// Two ranks, each with a chunk of one tensor; rank 0 with an object too.
Manifest example() {
  Manifest manifest;
  manifest.save_id = "a1";
  manifest.world_size = 2;
  manifest.format = "torch_dist";
  manifest.writer = "Tilestone 0.1.0";
  manifest.dialect = "pytorch";
  manifest.index = {{".metadata", 320, 77, IndexRole::kSwitch}};
  for (int rank = 0; rank < 2; ++rank) {
    RankReport report;
    report.rank = rank;
    report.world_size = 2;
    report.save_id = "a1";
    report.files = {{"a1__" + std::to_string(rank) + "_0.distcp", 4096}};
    report.tensors = {{"w", {std::string("w")}, DType::kFloat32, {4, 4}}};
    report.chunks = {{0, {{2 * rank, 0}, {2, 4}}, {0, 64, 900, {448, 1u + rank, 3u + rank}}}};
    if (rank == 0) report.objects = {{"lr", {std::string("lr")}, {0, 1024, 500, {0, 0, 9}}}};
    manifest.reports.push_back(std::move(report));
  }
  return manifest;
}

Metadata metadata_of(const Manifest& manifest) { return merge_reports(manifest.reports); }

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
  EXPECT_EQ(found.reports.size(), 2u);
}

TEST(Manifest, ReportsThatAreEncodedAlreadyAreTakenAsTheyAre) {
  Manifest manifest = example();
  const Bytes bytes = manifest.encode();
  const std::vector<Bytes> encoded = {manifest.reports[0].encode(), manifest.reports[1].encode()};
  manifest.reports.clear();
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
  manifest.reports[1].host = "node1";
  const Manifest found = Manifest::decode(manifest.encode(), "m");
  EXPECT_EQ(found.attributes, manifest.attributes);
  EXPECT_EQ(found.reports[0].host, "");
  EXPECT_EQ(found.reports[1].host, "node1");
  EXPECT_TRUE(Manifest::decode(example().encode(), "m").attributes.empty());
}

// A manifest's bytes with others before its checksum, which is made right, and a version.
Bytes changed(Bytes bytes, ByteView tail, uint8_t version) {
  bytes.resize(bytes.size() - sizeof(uint64_t));
  bytes[8] = static_cast<std::byte>(version);
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  ByteWriter out;
  out.raw(bytes);
  out.u64(xxh3_64(bytes));
  return std::move(out).take();
}

TEST(Manifest, OptionalFieldsOfLaterVersionsAreSkippedAndOtherVersionsRefused) {
  ByteWriter tail;
  write_named_fields(tail, {{"later", to_bytes("x")}});
  EXPECT_EQ(Manifest::decode(changed(example().encode(), tail.bytes(), 2), "m").save_id, "a1");
  for (const uint8_t version : {uint8_t{1}, uint8_t{3}}) {
    try {
      Manifest::decode(changed(example().encode(), {}, version), "m");
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    }
  }
  ByteWriter twice;  // one attribute twice
  ByteWriter attributes;
  attributes.varint(2);
  for (const char* text : {"a", "1", "a", "2"}) attributes.string(text);
  write_named_fields(twice, {{"attributes", attributes.bytes()}});
  EXPECT_THROW(Manifest::decode(changed(example().encode(), twice.bytes(), 2), "m"), Error);
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

TEST(Manifest, ReportsOfAnotherSaveOrRankAreRefused) {
  const auto check = [](void (*change)(Manifest&)) {
    Manifest manifest = example();
    change(manifest);
    EXPECT_THROW(Manifest::decode(manifest.encode(), "m"), Error);
  };
  check([](Manifest& m) { m.reports[1].save_id = "b2"; });
  check([](Manifest& m) { std::swap(m.reports[0], m.reports[1]); });
  check([](Manifest& m) { m.reports[1].world_size = 3; });
  check([](Manifest& m) { m.reports.pop_back(); });
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
  attach_checksums(metadata, example());
  EXPECT_EQ(metadata.tensors[0].chunks[1].at.checksums, (ItemChecksums{448, 2, 4}));
  EXPECT_EQ(metadata.objects[0].at.checksums, (ItemChecksums{0, 0, 9}));
  EXPECT_EQ(metadata.writer, "Tilestone 0.1.0");
}

TEST(Manifest, ContradictionsWithTheMetadataAreRefused) {
  const auto check = [](void (*change)(Metadata&)) {
    Metadata metadata = metadata_of(example());
    change(metadata);
    try {
      attach_checksums(metadata, example());
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

}  // namespace
}  // namespace tilestone
