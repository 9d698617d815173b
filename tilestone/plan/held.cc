#include "tilestone/plan/held.h"

#include <cstdint>
#include <map>
#include <string>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/plan/contents.h"
#include "tilestone/plan/texts_internal.h"

namespace tilestone {
namespace {

constexpr uint64_t kObjects = 0;  // instead of a hash of holders

uint64_t hash_of(const std::vector<int>& holders) {
  ByteWriter out;
  for (const int rank : holders) out.varint(static_cast<uint64_t>(rank));
  const uint64_t hash = xxh3_64(out.bytes());
  return hash == kObjects ? 1 : hash;
}

// The first rank that has something of one set, and how many ranks have.
struct Holders {
  int first = 0;
  Receipt::Held of_first;
  uint32_t ranks = 0;
};

[[noreturn]] void throw_differing(const Holders& holders, int rank, const Receipt::Held& held) {
  const bool objects = held.holders == kObjects;
  const uint32_t others = holders.of_first.parts;
  std::string problem = rank_text(rank) + " and " + rank_text(holders.first) + " differ in the " +
                        (objects ? "objects" : "shards") + " that " + std::to_string(held.ranks) +
                        " ranks are declared to have: ";
  if (held.parts != others) {
    problem += "they have " + std::to_string(held.parts) + " and " + std::to_string(others);
  } else {
    problem +=
        "both have " + std::to_string(others) +
        (objects ? ", but with other keys" : ", but with other keys, dtypes, shapes or boxes");
  }
  throw Error(ErrorCode::kMismatch, problem)
      .with_rank(rank)
      .with_hint(objects
                     ? "make an object that only some ranks have a ShardedObject with its own "
                       "key"
                     : "arrays that are not wrapped, and shards with holders, must be on each of "
                       "these ranks; with a communicator the ranks compare "
                       "keys");
}

}  // namespace

std::vector<Receipt::Held> held_by_rule(const LocalSavePlan& plan, int world_size) {
  std::vector<Receipt::Held> sets(plan.holder_sets.size());
  for (const PlanChunk& chunk : plan.chunks) {
    if (chunk.holders == PlanChunk::kUnknown || chunk.box.empty()) continue;
    Receipt::Held& held = sets[chunk.holders];
    ++held.parts;
    held.content += id_of(plan.tensors[chunk.tensor], chunk.box);
  }
  std::vector<Receipt::Held> found;
  for (size_t i = 0; i < sets.size(); ++i) {
    if (sets[i].parts == 0 || plan.holder_sets[i].size() == 1) continue;
    sets[i].holders = hash_of(plan.holder_sets[i]);
    sets[i].ranks = static_cast<uint32_t>(plan.holder_sets[i].size());
    found.push_back(sets[i]);
  }
  Receipt::Held objects{kObjects, static_cast<uint32_t>(world_size), 0, 0};
  for (const PlanObject& object : plan.objects) {
    if (!object.common) continue;
    ++objects.parts;
    objects.content += xxh3_64(as_bytes(object.key));
  }
  if (objects.parts > 0 && world_size > 1) found.push_back(objects);
  return found;
}

void expect_holders_have_the_same(std::span<const Receipt> receipts) {
  std::map<uint64_t, Holders> known;
  for (const Receipt& receipt : receipts) {
    for (const Receipt::Held& held : receipt.held) {
      Holders& holders =
          known.try_emplace(held.holders, Holders{receipt.rank, held, 0}).first->second;
      ++holders.ranks;
      if (held == holders.of_first) continue;
      throw_differing(holders, receipt.rank, held);
    }
  }
  for (const auto& [set, holders] : known) {
    if (holders.ranks == holders.of_first.ranks) continue;
    throw Error(ErrorCode::kMismatch,
                "only " + std::to_string(holders.ranks) + " of " +
                    std::to_string(holders.of_first.ranks) + " ranks that are declared to have " +
                    (set == kObjects ? "the same objects" : "the same shards") + " have any; " +
                    rank_text(holders.first) + " has " + std::to_string(holders.of_first.parts))
        .with_rank(holders.first)
        .with_hint("with a communicator the ranks compare keys");
  }
}

}  // namespace tilestone
