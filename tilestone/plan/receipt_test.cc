#include "tilestone/plan/receipt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error_testing.h"
#include "tilestone/plan/held.h"

namespace tilestone::report_test {

using testing::ElementsAre;
using testing::HasSubstr;

ReceiptItem at(uint32_t file, uint64_t offset, uint64_t length) {
  return {file, offset, length, {length / 2, 0x12345678, 0x9abcdef0}};
}

Receipt::Tensor tensor(std::string key, Dims shape, Path path = {}) {
  return {std::move(key), std::move(path), DType::kFloat32, std::move(shape)};
}

// A receipt of `rank` with one file and one chunk of each tensor: rows [2 * rank, 2 * rank + 2).
Receipt receipt_of(int rank, int world, std::vector<std::string> keys = {"w"}) {
  Receipt receipt;
  receipt.rank = rank;
  receipt.world_size = world;
  receipt.save_id = "s1";
  receipt.files = {{"__" + std::to_string(rank) + "_0.distcp", 4096}};
  for (uint32_t t = 0; t < keys.size(); ++t) {
    receipt.tensors.push_back(tensor(keys[t], {2 * world, 3}, {keys[t]}));
    receipt.chunks.push_back({t, {{2 * rank, 0}, {2, 3}}, at(0, 100 * t, 100)});
  }
  return receipt;
}

Error merge_error(const std::vector<Receipt>& receipts) {
  return error_of([&] { merge_receipts(receipts); });
}

TEST(JoinedReceipts, OfOneRankAgreeOnATensor) {
  const Receipt first = receipt_of(0, 2);
  Receipt second = receipt_of(0, 2);
  EXPECT_EQ(joined_receipts(first, second).tensors.size(), 1u);
  second.tensors[0].dtype = DType::kFloat64;
  const Error error = error_of([&] { joined_receipts(first, second); });
  EXPECT_EQ(error.code(), ErrorCode::kMismatch);
  EXPECT_EQ(error.key(), "w");
  EXPECT_THAT(error.what(), HasSubstr("two tensors under one key: float32 [4, 3] and float64"));
}

// ---- Merging ----

TEST(MergeReceipts, MakesTheMetadata) {
  std::vector<Receipt> receipts = {receipt_of(0, 3, {"w", "b"}), receipt_of(1, 3, {"b", "w"}),
                                   receipt_of(2, 3, {"w", "b"})};
  receipts[1].objects.push_back({"rng", {"rng"}, at(0, 300, 7)});
  const Metadata metadata = merge_receipts(receipts);
  EXPECT_EQ(metadata.save_id, "s1");
  EXPECT_THAT(metadata.writer, HasSubstr("Tilestone "));
  EXPECT_THAT(metadata.files, ElementsAre("__0_0.distcp", "__1_0.distcp", "__2_0.distcp"));
  ASSERT_EQ(metadata.tensors.size(), 2u);
  const StoredTensor* w = metadata.find_tensor("w");
  ASSERT_NE(w, nullptr);
  EXPECT_EQ(w->path, Path{"w"});
  ASSERT_EQ(w->chunks.size(), 3u);
  EXPECT_EQ(to_string(w->chunks[1].box), "[2:4, 0:3]");
  EXPECT_EQ(w->chunks[1].at.file, 1u);
  EXPECT_EQ(w->chunks[1].at.offset, 100u);
  EXPECT_EQ(w->chunks[1].at.checksums, at(0, 0, 100).checksums);
  ASSERT_NE(metadata.find_object("rng"), nullptr);
  EXPECT_EQ(metadata.find_object("rng")->at.length, 7u);
}

TEST(MergeReceipts, TensorsWithoutElementsKeepOneEmptyChunk) {
  std::vector<Receipt> receipts = {receipt_of(0, 3), receipt_of(1, 3), receipt_of(2, 3)};
  for (int rank : {1, 2}) {
    Receipt& receipt = receipts[static_cast<size_t>(rank)];
    receipt.tensors.push_back(tensor("none", {0, 4}));
    receipt.chunks.push_back({1, {{0, 0}, {0, 4}}, at(0, 200, 50)});
  }
  receipts[0].chunks.push_back({0, {{0, 0}, {0, 3}}, at(0, 100, 50)});  // an empty shard
  const Metadata metadata = merge_receipts(receipts);
  ASSERT_EQ(metadata.find_tensor("none")->chunks.size(), 1u);
  EXPECT_EQ(metadata.find_tensor("none")->chunks[0].at.file, 1u);
  EXPECT_EQ(metadata.find_tensor("w")->chunks.size(), 3u);

  receipts[1].chunks.pop_back();
  receipts[2].chunks.pop_back();
  EXPECT_TRUE(merge_receipts(receipts).find_tensor("none")->chunks.empty());
}

TEST(MergeReceipts, ReceiptsOfOtherSavesAndMissingRanksAreRefused) {
  const Receipt zero = receipt_of(0, 2);
  const Receipt one = receipt_of(1, 2);
  constexpr auto kInvalid = ErrorCode::kInvalidArgument;
  EXPECT_THAT(merge_error({}), IsError(kInvalid, "", "no receipts"));

  Receipt other = one;
  other.save_id = "s2";
  for (const auto& receipts : std::vector<std::vector<Receipt>>{
           {zero}, {zero, zero}, {zero, other}, {zero, receipt_of(1, 3)}}) {
    const Error error = merge_error(receipts);
    EXPECT_THAT(error, IsError(kInvalid, "", "rank 1 of 2", "missing"));
    EXPECT_EQ(error.rank(), 1);
  }
}

TEST(MergeReceipts, FilesBelongToOneRankAndItemsToTheirFile) {
  std::vector<Receipt> receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  receipts[1].files[0].name = receipts[0].files[0].name;
  Error error = merge_error(receipts);
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "", "rank 0", "rank 1", "same file"));
  EXPECT_EQ(error.file(), "__0_0.distcp");

  receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  receipts[1].files[0].size = 99;
  error = merge_error(receipts);
  EXPECT_THAT(error, IsError(ErrorCode::kInvalidArgument, "w", "100 bytes", "0", "99 bytes"));
  EXPECT_EQ(error.file(), "__1_0.distcp");
  EXPECT_EQ(error.rank(), 1);

  for (const uint64_t offset : {uint64_t{3997}, uint64_t{4097}, UINT64_MAX}) {
    receipts = {receipt_of(0, 2), receipt_of(1, 2)};
    receipts[1].chunks[0].at.offset = offset;  // the file has 4096 bytes
    EXPECT_EQ(merge_error(receipts).key(), "w") << offset;
  }
}

TEST(MergeReceipts, DisagreementsNameKeyAndRanks) {
  std::vector<Receipt> receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  receipts[1].tensors[0].dtype = DType::kBFloat16;
  Error error = merge_error(receipts);
  EXPECT_THAT(error, IsError(ErrorCode::kMismatch, "w", "rank 0", "float32 [4, 3]", "rank 1",
                             "bfloat16 [4, 3]"));

  receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  receipts[1].objects.push_back({"w", {}, at(0, 0, 10)});
  EXPECT_THAT(merge_error(receipts), IsError(ErrorCode::kMismatch, "w", "rank 1", "tensor"));

  receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  receipts[0].objects.push_back({"o", {}, at(0, 0, 10)});
  receipts[1].tensors.push_back(tensor("o", {0}));
  EXPECT_THAT(merge_error(receipts), IsError(ErrorCode::kMismatch, "o", "rank 1", "object"));
}

TEST(MergeReceipts, WhatIsWrittenTwiceOrByNobodyNamesKeyBoxAndRanks) {
  std::vector<Receipt> receipts = {receipt_of(0, 3), receipt_of(1, 3), receipt_of(2, 3)};
  receipts[2].chunks[0].box = {{1, 1}, {2, 1}};
  EXPECT_THAT(merge_error(receipts),
              IsError(ErrorCode::kCoverage, "w", "rank 2", "[1:3, 1:2]", "overlap"));

  receipts[2].chunks.clear();
  EXPECT_THAT(merge_error(receipts),
              IsError(ErrorCode::kCoverage, "w", "no rank", "[4:6, 0:3]", "[6, 3]"));

  receipts[2].chunks.push_back({0, {{4, 0}, {3, 3}}, at(0, 0, 100)});
  EXPECT_THAT(merge_error(receipts),
              IsError(ErrorCode::kCoverage, "w", "rank 2", "[4:7, 0:3]", "[6, 3]"));

  receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  for (Receipt& receipt : receipts) receipt.objects.push_back({"o", {}, at(0, 0, 10)});
  EXPECT_THAT(merge_error(receipts),
              IsError(ErrorCode::kCoverage, "o", "twice", "rank 0", "rank 1"));
}

TEST(MergeReceipts, ASingleChunkThatDoesNotCoverItsTensorIsRefused) {
  const Box parts[] = {
      {{0, 0}, {1, 3}}, {{1, 0}, {1, 3}}, {{0, 0}, {2, 2}}, {{0, 1}, {2, 2}}, {{0, 0}, {0, 3}}};
  for (const Box& part : parts) {
    std::vector<Receipt> receipts = {receipt_of(0, 1)};
    receipts[0].chunks[0].box = part;
    const Error error = merge_error(receipts);
    EXPECT_EQ(error.code(), ErrorCode::kCoverage) << to_string(part);
    EXPECT_EQ(error.key(), "w") << to_string(part);
  }
}

// ---- Copies and attributes ----

ReceiptItem in_file(uint32_t file, uint32_t payload_crc32) {
  return {file, 0, 100, {50, payload_crc32, 7}};
}

// Two ranks with a row block of "w" each. Rank 1 also has a copy of rank 0's block, in a separate
// file.
std::vector<Receipt> with_copy() {
  std::vector<Receipt> receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  receipts[1].files.push_back({"__1_1.distcp", 100});
  receipts[1].copies.push_back({0, receipts[0].chunks[0].box, in_file(1, 0x12345678)});
  return receipts;
}

TEST(MergeReceipts, ACopyCountsForNoCoverage) {
  const Metadata metadata = merge_receipts(with_copy(), CopyPolicy::kAccept);
  ASSERT_EQ(metadata.find_tensor("w")->chunks.size(), 2u);
  ASSERT_EQ(metadata.copies.size(), 1u);
  EXPECT_EQ(metadata.copies[0].chunk, 0u);
  EXPECT_EQ(metadata.files[metadata.copies[0].at.file], "__1_1.distcp");
  EXPECT_TRUE(merge_receipts({receipt_of(0, 1)}, CopyPolicy::kAccept).copies.empty());
}

TEST(MergeReceipts, AChunkThatTwoRanksWroteIsTheLowestRanksAndACopy) {
  std::vector<Receipt> receipts = {receipt_of(0, 2, {"v", "w"}), receipt_of(1, 2, {"v", "w"})};
  receipts[1].chunks[1].box = receipts[0].chunks[1].box;  // then the second half of w is missing
  EXPECT_EQ(error_of([&] { merge_receipts(receipts, CopyPolicy::kAccept); }).code(),
            ErrorCode::kCoverage);
  receipts[1].chunks.push_back({1, {{2, 0}, {2, 3}}, at(0, 300, 100)});
  const Metadata metadata = merge_receipts(receipts, CopyPolicy::kAccept);
  ASSERT_EQ(metadata.copies.size(), 1u);
  EXPECT_EQ(metadata.tensors[metadata.copies[0].tensor].key, "w");
  EXPECT_EQ(metadata.tensors[1].chunks[metadata.copies[0].chunk].at.file, 0u);
  EXPECT_EQ(metadata.copies[0].at.file, 1u);
  EXPECT_EQ(merge_error(receipts).code(), ErrorCode::kCoverage);  // if copies are refused
}

TEST(MergeReceipts, ACopyWithOtherElementsOrOfNoChunkIsRefusedByKeyAndRank) {
  const auto check = [](ErrorCode code, void (*change)(std::vector<Receipt>&)) {
    std::vector<Receipt> receipts = with_copy();
    change(receipts);
    const Error error = error_of([&] { merge_receipts(receipts, CopyPolicy::kAccept); });
    EXPECT_EQ(error.code(), code) << error.message();
    EXPECT_EQ(error.key(), "w");
    EXPECT_EQ(error.rank(), 1);
  };
  using Receipts = std::vector<Receipt>;
  check(ErrorCode::kMismatch, [](Receipts& r) { r[1].copies[0].at.checksums.payload_crc32 = 1; });
  check(ErrorCode::kCoverage, [](Receipts& r) { r[1].copies[0].box = {{1, 0}, {2, 3}}; });
  check(ErrorCode::kInvalidArgument, [](Receipts& r) {  // in the same file as the chunk
    r[1].copies[0] = r[1].chunks[0];
    r[1].copies[0].at.offset = 1000;
  });
}

TEST(MergeReceipts, AttributesOfAllRanksComeTogetherAndMayNotDiffer) {
  std::vector<Receipt> receipts = {receipt_of(0, 2, {"v", "w"}), receipt_of(1, 2, {"w", "v"})};
  receipts[0].attributes[1] = {{"kind", "glu"}, {"scale", 0.5}};
  receipts[1].attributes[0] = {{"kind", "glu"}, {"layer", int64_t{3}}};
  const Metadata metadata = merge_receipts(receipts);
  ASSERT_EQ(metadata.attributes.size(), 1u);
  EXPECT_EQ(metadata.attributes.at("w"),
            (Attributes{{"kind", "glu"}, {"layer", int64_t{3}}, {"scale", 0.5}}));
  receipts[1].attributes[0]["scale"] = 0.25;
  const Error error = merge_error(receipts);
  EXPECT_EQ(error.code(), ErrorCode::kMismatch);
  EXPECT_EQ(error.key(), "w");
  for (const char* part : {"rank 0", "rank 1", "\"scale\"", "0.5", "0.25"}) {
    EXPECT_THAT(error.message(), HasSubstr(part));
  }
}

// ---- What the declared holders have ----

LocalSavePlan plan_of(const std::vector<std::string>& keys, int ranks, int64_t rows = 4) {
  LocalSavePlan plan;
  plan.holder_sets.emplace_back(static_cast<size_t>(ranks));
  std::iota(plan.holder_sets[0].begin(), plan.holder_sets[0].end(), 0);
  for (const std::string& key : keys) {
    plan.tensors.push_back({key, DType::kFloat32, {rows}});
    plan.chunks.push_back({static_cast<uint32_t>(plan.chunks.size()), 0, true, {{0}, {rows}}});
  }
  return plan;
}

Error held_error(const std::vector<LocalSavePlan>& plans) {
  const int world = static_cast<int>(plans.size());
  std::vector<Receipt> receipts;
  for (int rank = 0; rank < world; ++rank) {
    receipts.push_back(receipt_of(rank, world));
    receipts.back().held = held_by_rule(plans[static_cast<size_t>(rank)], world);
  }
  return merge_error(receipts);
}

TEST(Held, TheOrderOfKeysAndShardsWithoutElementsDoNotMatter) {
  LocalSavePlan other = plan_of({"b", "a", "c"}, 2);
  other.chunks[2].box = {{4}, {0}};
  std::vector<Receipt> receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  receipts[0].held = held_by_rule(plan_of({"a", "b"}, 2), 2);
  receipts[1].held = held_by_rule(other, 2);
  EXPECT_EQ(receipts[0].held, receipts[1].held);
  ASSERT_EQ(receipts[0].held.size(), 1u);
  EXPECT_EQ(merge_receipts(receipts).tensors.size(), 1u);
}

TEST(Held, WhatOnlySomeOfItsDeclaredHoldersHaveIsRefusedByRank) {
  const LocalSavePlan all = plan_of({"a", "b"}, 3);
  LocalSavePlan object = all;
  object.objects.push_back({"o", true});
  LocalSavePlan other_object = all;
  other_object.objects.push_back({"p", true});
  for (const LocalSavePlan& other :
       {plan_of({"a"}, 3), plan_of({"a", "b", "c"}, 3), plan_of({"a", "c"}, 3),
        plan_of({"a", "b"}, 3, 5), plan_of({"a", "b"}, 2), plan_of({}, 3), object}) {
    const Error error = held_error({all, all, other});
    EXPECT_EQ(error.code(), ErrorCode::kMismatch) << error.what();
    EXPECT_TRUE(error.rank() == 2 || error.rank() == 0) << error.what();
  }
  EXPECT_EQ(held_error({object, other_object, object}).rank(), 1);
}

// ---- Encoding ----

// One attribute of each kind.
Attributes attributes() {
  return {{"bool", true},
          {"bytes", Bytes(3)},
          {"dict", Value::dict({{"a", Value::list({1, 2.5, nullptr})}, {3, Value::tuple({})}})},
          {"int", int64_t{-4}},
          {"text", "glu"}};
}

Receipt sample_receipt() {
  Receipt receipt = receipt_of(1, 4, {"model.layers.0.weight", "model.layers.1.weight"});
  receipt.files.push_back({"empty.distcp", 0});
  receipt.tensors[0].path = {"model", "layers", int64_t{0}, "weight"};
  receipt.tensors[1].path = {"another", int64_t{-7}};
  receipt.tensors.push_back(tensor("", {}, {""}));
  receipt.tensors.push_back(
      tensor("model.layers.-5.x", {0, 3}, {"model.layers", int64_t{-5}, "x"}));
  receipt.tensors.push_back(tensor("no.path", {int64_t{1} << 62}));
  receipt.chunks.push_back({2, {{}, {}}, at(0, 4000, 96)});
  receipt.objects.push_back({"rng", {"rng"}, at(0, 300, 7)});
  receipt.host = "node7";
  receipt.steps = {{"planning", 1700000000000000, 1200}, {"writing", 1700000000001200, 3}};
  receipt.copies.push_back({0, {{0, 0}, {2, 3}}, at(0, 500, 100)});
  receipt.parts = {{0, 0, 60, 0xabcdef01}, {1, 0, 0, 0}};
  receipt.attributes[1] = attributes();
  receipt.held = {{7, 4, 2, 0x1234567890abcdef}, {0, 4, 1, 5}};
  receipt.files[0].steps = 20;
  receipt.chunks[1].at.hash = {1, 2};
  receipt.copies[0].at.hash = {3, 0};
  return receipt;
}

TEST(ReceiptEncoding, ComesBack) {
  const Receipt receipt = sample_receipt();
  const Receipt back = Receipt::decode(receipt.encode());
  EXPECT_EQ(back.rank, 1);
  EXPECT_EQ(back.world_size, 4);
  EXPECT_EQ(back.save_id, "s1");
  ASSERT_EQ(back.files.size(), 2u);
  EXPECT_EQ(back.files[0].name, "__1_0.distcp");
  EXPECT_EQ(back.files[0].size, 4096u);
  ASSERT_EQ(back.tensors.size(), receipt.tensors.size());
  for (size_t i = 0; i < receipt.tensors.size(); ++i) {
    EXPECT_EQ(back.tensors[i].key, receipt.tensors[i].key);
    EXPECT_EQ(back.tensors[i].path, receipt.tensors[i].path) << receipt.tensors[i].key;
    EXPECT_EQ(back.tensors[i].dtype, receipt.tensors[i].dtype);
    EXPECT_EQ(back.tensors[i].global_shape, receipt.tensors[i].global_shape);
  }
  ASSERT_EQ(back.chunks.size(), receipt.chunks.size());
  for (size_t i = 0; i < receipt.chunks.size(); ++i) {
    EXPECT_EQ(back.chunks[i].tensor, receipt.chunks[i].tensor);
    EXPECT_EQ(back.chunks[i].box, receipt.chunks[i].box);
    EXPECT_EQ(back.chunks[i].at.offset, receipt.chunks[i].at.offset);
    EXPECT_EQ(back.chunks[i].at.length, receipt.chunks[i].at.length);
    EXPECT_EQ(back.chunks[i].at.checksums, receipt.chunks[i].at.checksums);
    EXPECT_EQ(back.chunks[i].at.hash, receipt.chunks[i].at.hash);
  }
  EXPECT_EQ(back.files[0].steps, 20u);
  EXPECT_EQ(back.files[1].steps, 0u);
  EXPECT_EQ(back.copies[0].at.hash, receipt.copies[0].at.hash);
  ASSERT_EQ(back.objects.size(), 1u);
  EXPECT_EQ(back.objects[0].key, "rng");
  EXPECT_EQ(back.objects[0].at.length, 7u);
  EXPECT_EQ(back.host, "node7");
  ASSERT_EQ(back.copies.size(), 1u);
  EXPECT_EQ(back.copies[0].box, receipt.copies[0].box);
  EXPECT_EQ(back.copies[0].at.offset, 500u);
  EXPECT_EQ(back.copies[0].at.checksums, at(0, 0, 100).checksums);
  ASSERT_EQ(back.parts.size(), 2u);
  EXPECT_EQ(back.parts[0].length, 60u);
  EXPECT_EQ(back.parts[0].crc32, 0xabcdef01);
  EXPECT_EQ(back.attributes, receipt.attributes);
  EXPECT_EQ(back.held, receipt.held);
  EXPECT_EQ(back.steps, receipt.steps);
  EXPECT_EQ(back.encode(), receipt.encode());
}

TEST(ReceiptEncoding, KeysOfDictsComeBackAndOfAllRanksTheLowestCounts) {
  std::vector<Receipt> receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  receipts[0].dict_keys[{"a", int64_t{0}}] = {true, {}};
  receipts[0].dict_keys[{}] = {false, {{"None", Value()}, {"0.5", Value(0.5)}}};
  receipts[1].dict_keys[{}] = {false, {{"None", Value("None")}, {"7", Value(7)}}};
  for (Receipt& receipt : receipts) receipt = Receipt::decode(receipt.encode());
  const Metadata metadata = merge_receipts(receipts);
  ASSERT_EQ(metadata.dict_keys.size(), 2u);
  EXPECT_TRUE(metadata.dict_keys.at({"a", int64_t{0}}).ints);
  const DictKeys& top = metadata.dict_keys.at({});
  EXPECT_EQ(top.others.size(), 3u);
  EXPECT_TRUE(top.others.at("None").is_null());
  EXPECT_EQ(top.others.at("7").as_int(), 7);
}

TEST(ReceiptEncoding, EmptyDictsAndTheOrderOfLeavesComeBack) {
  std::vector<Receipt> receipts = {receipt_of(0, 2), receipt_of(1, 2)};
  Receipt& first = receipts[0];
  first.dict_keys[{"b"}] = {true, {}};
  first.dict_keys[{"a"}] = {.ints = false, .others = {}, .empty = true, .order = 5};
  first.dict_keys[{"c", int64_t{0}}] = {.ints = false, .others = {}, .empty = true, .order = 2};
  receipts[1].dict_keys[{"a"}] = {true, {}};
  for (Receipt& receipt : receipts) receipt = Receipt::decode(receipt.encode());
  EXPECT_EQ(first.dict_keys.at({"a"}).order, 5u);
  EXPECT_TRUE(first.dict_keys.at({"b"}).ints);
  EXPECT_FALSE(first.dict_keys.at({"b"}).empty);
  EXPECT_EQ(first.encode(), Receipt::decode(first.encode()).encode());
  const Metadata metadata = merge_receipts(receipts);
  EXPECT_TRUE(metadata.dict_keys.at({"a"}).empty);
  EXPECT_TRUE(metadata.dict_keys.at({"a"}).ints);
  EXPECT_EQ(metadata.dict_keys.at({"a"}).order, 5u);
  EXPECT_EQ(metadata.dict_keys.at({"c", int64_t{0}}).order, 2u);

  Receipt sample = sample_receipt();
  EXPECT_EQ(Receipt::decode(sample.encode()).tensors[0].order, 0u);
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    sample.tensors[i].order = static_cast<uint32_t>(7 * sample.tensors.size() - 7 * i);
  }
  sample.objects[0].order = UINT32_MAX;
  const Receipt back = Receipt::decode(sample.encode());
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    EXPECT_EQ(back.tensors[i].order, sample.tensors[i].order);
  }
  EXPECT_EQ(back.objects[0].order, UINT32_MAX);
}

TEST(ReceiptEncoding, EveryChangedOrMissingByteIsFound) {
  const Bytes good = sample_receipt().encode();
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_EQ(error_of([&] { Receipt::decode(ByteView(good).first(size)); }).code(),
              ErrorCode::kCorrupt);
  }
  for (size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= std::byte{1};
    EXPECT_EQ(error_of([&] { Receipt::decode(bad); }).code(), ErrorCode::kCorrupt) << i;
  }
}

TEST(ReceiptEncoding, AttributesAreOfPlainKindsAndNotDeep) {
  EXPECT_GT(attribute_bytes(attributes()), 10u);
  Value deep;
  for (int depth = 0; depth < 15; ++depth) deep = Value::list({deep});
  attribute_bytes({{"deep", deep}});
  const Value refused[] = {Value::list({deep}), Value(DType::kInt8),
                           Value(BigInt{Bytes(9, std::byte{1})}), Value::ordered_dict({}),
                           Value::dict({{Value(1.5), Value()}})};
  for (const Value& value : refused) {
    const Error error = error_of([&] { attribute_bytes({{"mine", value}}); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << to_string(value);
    EXPECT_THAT(error.message(), HasSubstr("\"mine\""));
  }
}

// A payload of 200,000 bytes in blocks of 64 KiB: four of them.
Receipt report_with_blocks() {
  Receipt receipt = sample_receipt();
  receipt.files[0].size = 1u << 20;
  receipt.chunks[0].at = {0, 0, 200'100, {60, 1, 2}};
  const BlockSums sums{200'000, 64u << 10, {11, 12, 13, 14}};
  receipt.chunks[0].at.checksums.blocks = std::make_shared<const BlockSums>(sums);
  return receipt;
}

TEST(ReceiptEncoding, BlocksComeBackAndThoseOfCopiesAreNotWritten) {
  Receipt receipt = report_with_blocks();
  receipt.copies[0].at = receipt.chunks[0].at;
  const Receipt back = Receipt::decode(receipt.encode());
  EXPECT_EQ(back.chunks[0].at.checksums, receipt.chunks[0].at.checksums);
  EXPECT_EQ(back.chunks[1].at.checksums.blocks, nullptr);
  EXPECT_EQ(back.copies[0].at.checksums.blocks, nullptr);
  EXPECT_EQ(back.encode(), Receipt::decode(back.encode()).encode());
}

TEST(ReceiptEncoding, HostileListsOfBlocksAreRefused) {
  const auto refused = [](BlockSums sums, const std::string& problem) {
    Receipt receipt = report_with_blocks();
    receipt.chunks[0].at.checksums.blocks = std::make_shared<const BlockSums>(std::move(sums));
    const Error error = error_of([&] { Receipt::decode(receipt.encode()); });
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_THAT(error.message(), HasSubstr(problem));
  };
  const std::vector<uint32_t> four = {11, 12, 13, 14};
  for (const uint64_t size : {uint64_t{0}, uint64_t{1}, uint64_t{32} << 10, uint64_t{96} << 10,
                              uint64_t{2} << 30, ~uint64_t{0}}) {
    refused({200'000, size, four}, "the size of a payload's blocks is invalid");
  }
  refused({200'000, 64u << 10, {11, 12, 13}}, "too short");
  refused({200'000, 64u << 10, {}}, "too short");
  refused({200'000, 64u << 10, {11, 12, 13, 14, 15}}, "");  // then bytes are left over
  refused({200'000, 256u << 10, {11}}, "a payload of one block");
  refused({0, 64u << 10, {}}, "a payload of one block");
  refused({200'041, 64u << 10, four}, "outside its item");
  refused({~uint64_t{0}, 64u << 10, four}, "outside its item");
}

// Bytes with a correct checksum, made by an attacker.
TEST(ReceiptEncoding, HostileBytesAreCorruptAndNothingWorse) {
  const Bytes good = report_with_blocks().encode();
  constexpr uint64_t kSeed = 5;
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 50'000; ++round) {
    Bytes body(good.begin(), good.end() - 8);
    if (round % 3 == 0) body.resize(1 + random() % body.size());
    for (uint64_t changes = 1 + random() % 6; changes > 0; --changes) {
      body[random() % body.size()] = static_cast<std::byte>(random());
    }
    body[0] = std::byte{1};
    ByteWriter out;
    out.raw(body);
    out.u64(xxh3_64(body));
    try {
      Receipt::decode(out.bytes());
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), ErrorCode::kCorrupt) << "seed " << kSeed << " round " << round;
    }
  }
}

}  // namespace tilestone::report_test
