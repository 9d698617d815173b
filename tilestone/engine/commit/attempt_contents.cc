// Compares what the ranks of a save without a communicator hold (plan/contents.h), when it is
// published. Each rank's receipt has a hash for everything that ranks compare.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/run/differing_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/plan/contents.h"

namespace tilestone::engine {
namespace {

// The ids with which ranks hold different contents.
std::set<uint64_t> differing_ids(const std::vector<AttemptReceipt>& left) {
  std::map<uint64_t, uint64_t> first;
  std::set<uint64_t> differing;
  for (const AttemptReceipt& one : left) {
    for (const HeldContent& held : one.held) {
      if (held.content == 0) continue;
      const auto [known, is_new] = first.emplace(held.id, held.content);
      if (!is_new && known->second != held.content) differing.insert(held.id);
    }
  }
  return differing;
}

// The keys of what a rank has written, by id.
std::map<uint64_t, std::string> written_keys(const Receipt& receipt) {
  std::map<uint64_t, std::string> keys;
  for (const Receipt::Object& object : receipt.objects) {
    keys.emplace(id_of(object.key), object.key);
  }
  for (const Receipt::Chunk& chunk : receipt.chunks) {
    const Receipt::Tensor& tensor = receipt.tensors[chunk.tensor];
    keys.emplace(id_of(PlanTensor{tensor.key, tensor.dtype, tensor.global_shape}, chunk.box),
                 tensor.key);
  }
  return keys;
}

// As checks.common_differs says: throws, logs, or does nothing.
void report_differing(const Attempt& attempt, const std::string& what, int rank) {
  const auto common_differs = static_cast<Checks::Differing>(attempt.head.common_differs);
  if (common_differs == Checks::Differing::kError) {
    throw Error(ErrorCode::kMismatch, what).with_rank(rank);
  }
  if (common_differs == Checks::Differing::kWarn) log(LogLevel::kWarning, what);
}

void expect_same_keys(const AllLeft& all) {
  std::vector<int> other_keys;
  for (int rank = 0; const AttemptReceipt& one : all.left) {
    if (one.common_keys != all.left.front().common_keys) other_keys.push_back(rank);
    ++rank;
  }
  if (other_keys.empty()) return;
  throw Error(ErrorCode::kMismatch,
              ranks_text(other_keys) +
                  ": the keys of the objects differ from those on rank 0, and only rank 0 writes "
                  "these objects")
      .with_rank(other_keys.front())
      .with_hint("make an object that only some ranks have a ShardedObject with its own key");
}

// Finds objects that no rank wrote because no rank has their main replica. Nothing else would
// report them.
void expect_all_objects(const AllLeft& all) {
  std::set<std::string_view> written;
  for (const Receipt& receipt : all.receipts) {
    for (const Receipt::Object& object : receipt.objects) written.insert(object.key);
  }
  for (size_t rank = 0; rank < all.left.size(); ++rank) {
    for (const std::string& key : all.left[rank].unwritten_objects) {
      if (written.contains(key)) continue;
      throw Error(ErrorCode::kCoverage,
                  "rank " + std::to_string(rank) + " has a replica of an object that no rank wrote")
          .with_key(key)
          .with_rank(static_cast<int>(rank))
          .with_hint("set its replica_id to 0 on exactly one of the ranks that have it");
    }
  }
}

void expect_same_contents(const Attempt& attempt, const AllLeft& all) {
  const std::vector<AttemptReceipt>& left = all.left;
  const auto common_differs = static_cast<Checks::Differing>(attempt.head.common_differs);
  if (common_differs == Checks::Differing::kIgnore) return;
  const std::set<uint64_t> ids = differing_ids(left);
  if (ids.empty()) return;
  std::vector<std::map<uint64_t, std::string>> written;
  std::map<uint64_t, std::string> keys;
  for (const Receipt& receipt : all.receipts) {
    written.push_back(written_keys(receipt));
    for (const uint64_t id : ids) {
      const auto found = written.back().find(id);
      if (found != written.back().end()) keys.emplace(id, found->second);
    }
  }
  std::vector<std::vector<NamedContent>> by_rank(left.size());
  for (size_t rank = 0; rank < left.size(); ++rank) {
    for (const HeldContent& held : left[rank].held) {
      if (held.content == 0 || !ids.contains(held.id)) continue;
      by_rank[rank].push_back({held, keys[held.id], written[rank].contains(held.id), false});
    }
  }
  std::vector<DifferingContent> differing = differences_of(by_rank);
  const auto common = std::find_if(
      differing.begin(), differing.end(),
      [&](const DifferingContent& one) { return one.key == attempt.dialect->common_object(); });
  if (common != differing.end()) {
    report_differing(attempt,
                     "the common state of " + ranks_text(common->others) +
                         " differs from that of rank 0, which is saved",
                     common->others.front());
    differing.erase(common);
  }
  tell_of_differing(differing, common_differs, attempt.dialect->name());
}

}  // namespace

void expect_one_state(const Attempt& attempt, const AllLeft& all) {
  std::vector<std::vector<ListLength>> lists;
  for (const AttemptReceipt& one : all.left) lists.push_back(one.lists);
  expect_same_lengths(lists, !attempt.dialect->common_object().empty());
  expect_same_keys(all);
  expect_all_objects(all);
  expect_same_contents(attempt, all);
}

// Names what only some of its declared holders have. Receipts' sums of hashes show only that there
// is something (plan/held.h).
void expect_declared(const AllLeft& all) {
  struct Holders {
    uint32_t declared = 0;
    uint32_t found = 0;
    int first = 0;
  };
  std::map<uint64_t, Holders> holders;
  for (size_t rank = 0; rank < all.left.size(); ++rank) {
    for (const HeldContent& held : all.left[rank].held) {
      if (held.ranks == 0) continue;
      Holders& of_id = holders[held.id];
      if (of_id.found++ == 0) of_id.first = static_cast<int>(rank);
      of_id.declared = held.ranks;
    }
  }
  for (const Bytes& receipt : all.encoded) {
    for (const auto& [id, key] : written_keys(Receipt::decode(receipt))) {
      const auto found = holders.find(id);
      if (found == holders.end() || found->second.found >= found->second.declared) continue;
      const Holders& of_id = found->second;
      throw Error(ErrorCode::kCoverage, "only " + std::to_string(of_id.found) + " of the " +
                                            std::to_string(of_id.declared) +
                                            " ranks that are declared to hold it have it")
          .with_key(key)
          .with_rank(of_id.first);
    }
  }
}

}  // namespace tilestone::engine
