#include "tilestone/engine/save/reported_before_internal.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/state/content_hash.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kHasSum = uint64_t{1} << 32;  // so that no checksum counts as "not known"
constexpr const char* kNothingThen = "nothing then, or something else";
constexpr const char* kNothingNow = "nothing now, or something else";

// What a rank writes or has written: ids tell keys, dtypes, shapes and boxes apart.
struct ReportedItem {
  std::string_view key;
  uint64_t content = 0;  // 0: not known
};
using ReportedItems = std::map<uint64_t, ReportedItem>;

[[noreturn]] void fail_other_state(int rank, std::string_view key, const std::string& what) {
  throw Error(ErrorCode::kMismatch,
              "this rank saved another state under this token and number before: " + what)
      .with_key(std::string(key))
      .with_rank(rank)
      .with_hint("use another number to save another state");
}

// All of `part` is in `whole`, with the same content where that is known.
void expect_within(const ReportedItems& part, const ReportedItems& whole, int rank,
                   const std::string& otherwise) {
  for (const auto& [id, item] : part) {
    if (!whole.contains(id)) fail_other_state(rank, item.key, otherwise);
  }
  for (const auto& [id, item] : part) {
    const ReportedItem& other = whole.at(id);
    if (item.content == 0 || other.content == 0 || item.content == other.content) continue;
    fail_other_state(rank, item.key, "another value, or other elements");
  }
}

// `sums`: checksums of elements instead of the contents that ranks compare.
ReportedItems written_items(const Receipt& receipt, bool sums) {
  ReportedItems items;
  for (const Receipt::Object& object : receipt.objects) {
    items[id_of(object.key)] = {object.key, sums ? 0 : object.content};
  }
  for (const Receipt::Chunk& chunk : receipt.chunks) {
    if (chunk.box.empty()) continue;
    const Receipt::Tensor& tensor = receipt.tensors[chunk.tensor];
    items[id_of(PlanTensor{tensor.key, tensor.dtype, tensor.global_shape}, chunk.box)] = {
        tensor.key, sums ? kHasSum | chunk.at.checksums.payload_crc32 : 0};
  }
  return items;
}

// What the rank would write now, and every object that it holds: one may be in a file of the index.
ReportedItems items_of_now(const SaveShare& share, bool objects) {
  const LocalSavePlan& plan = share.local;
  ReportedItems items;
  for (const uint32_t i : share.assignment.chunks) {
    const PlanChunk& chunk = plan.chunks[i];
    const PlanTensor& tensor = plan.tensors[chunk.tensor];
    if (!chunk.box.empty()) items[id_of(tensor, chunk.box)] = {tensor.key, chunk.content};
  }
  for (const PlanObject& object : plan.objects) {
    if (objects) items[id_of(object.key)] = {object.key, object.content};
  }
  return items;
}

// Reads all elements that the rank has written.
void expect_elements(const Receipt& receipt, const SaveShare& share) {
  std::map<std::string_view, std::vector<const Piece*>> pieces;
  for (const TensorItem& item : share.items.tensors) {
    for (const Piece& piece : item.pieces) pieces[item.key].push_back(&piece);
  }
  for (const auto* chunks : {&receipt.chunks, &receipt.copies}) {
    for (const Receipt::Chunk& chunk : *chunks) {
      const std::string& key = receipt.tensors[chunk.tensor].key;
      const std::vector<const Piece*>& of_key = pieces[key];
      const auto piece = std::ranges::find(of_key, chunk.box, &Piece::box);
      if (piece == of_key.end() || chunk.box.empty()) continue;
      uint32_t crc = 0;
      for_each_block((*piece)->data, [&](ByteView block) { crc = crc32(block, crc); });
      if (crc != chunk.at.checksums.payload_crc32) {
        fail_other_state(share.rank, key, "other elements");
      }
    }
  }
}

void expect_state(uint64_t then, uint64_t now, int rank) {
  if (then == 0 || now == 0 || then == now) return;
  fail_other_state(rank, "", "other values, or tensors that another rank writes");
}

}  // namespace

uint64_t state_of(const SaveShare& share) {
  ByteWriter out;
  for (const HeldContent& held : held_contents(share.local)) {
    out.u64(held.id);
    out.u64(held.content);
  }
  return std::max<uint64_t>(xxh3_64(out.bytes()), 1);
}

void expect_reported_state(const Receipt& receipt, const SaveShare& share) {
  const ReportedItems written = written_items(receipt, false);
  expect_within(items_of_now(share, false), written, share.rank, kNothingThen);
  expect_within(written, items_of_now(share, true), share.rank, kNothingNow);
  expect_elements(receipt, share);
  expect_state(receipt.state, state_of(share), share.rank);
}

void expect_same_receipt(const Receipt& counted, const Receipt& own) {
  const ReportedItems then = written_items(counted, true), now = written_items(own, true);
  expect_within(now, then, own.rank, kNothingThen);
  expect_within(then, now, own.rank, kNothingNow);
  expect_state(counted.state, own.state, own.rank);
}

}  // namespace tilestone::engine
