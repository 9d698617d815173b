// Step 3 of the protocol in attempt.cc: the receipts of a group are merged, then those of all
// groups, and what they say is described.
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"

namespace tilestone::engine {
namespace {

enum class Merged : uint8_t { kIncomplete, kBefore, kNow };

// Looks first for the receipt that was missing before: as long as many are missing, one look is
// usually enough.
bool all_left(Attempt& attempt, int group) {
  const AttemptHead& head = attempt.head;
  const int begin = head.group_begin(group), count = head.group_end(group) - begin;
  const int first = head.group_of(attempt.next_rank) == group ? attempt.next_rank - begin : 0;
  for (int i = 0; i < count; ++i) {
    const int rank = begin + (first + i) % count;
    if (attempt.location->stat(attempt_receipt_name(head, rank))) continue;
    attempt.next_rank = rank;
    return false;
  }
  return true;
}

Receipt checked_receipt(const Attempt& attempt, int rank, ByteView left, const std::string& file) {
  Receipt receipt = Receipt::decode(AttemptReceipt::decode(left, file).receipt);
  if (receipt.rank == rank && receipt.save_id == attempt.id()) return receipt;
  throw Error(ErrorCode::kCorrupt, "the file has the receipt of rank " +
                                       std::to_string(receipt.rank) + " of the save " +
                                       receipt.save_id)
      .with_file(file);
}

Merged merge_group(Attempt& attempt, int group, BeforeMerging before, int threads,
                   Deadline deadline) {
  Storage& storage = *attempt.location;
  const AttemptHead& head = attempt.head;
  const std::string name = group_name(head.save_id, group);
  const auto current = [&] { return storage.stat(name) ? Merged::kBefore : Merged::kIncomplete; };
  if (storage.stat(name)) return Merged::kBefore;
  if (!all_left(attempt, group)) return current();
  std::vector<Bytes> left;
  std::vector<Receipt> receipts;
  for (int rank = head.group_begin(group); rank < head.group_end(group); ++rank) {
    const std::string file = attempt_receipt_name(head, rank);
    auto bytes = read_if_there(storage, file);
    if (!bytes) return current();
    receipts.push_back(checked_receipt(attempt, rank, *bytes, file));
    left.push_back(*std::move(bytes));
  }
  expect_files(storage, receipts, threads, deadline);
  before(attempt, group, std::move(receipts), deadline);
  storage.sync_directory(group_directory(head.save_id, group));
  publish_unless_there(attempt, name, group_temporary(head.save_id, group, "merged"),
                       encode_group(left), deadline);
  return Merged::kNow;
}

// Removes a merged group's receipts, so that the publisher need not remove those of all ranks.
void remove_receipts(const Attempt& attempt, int group) {
  std::vector<std::string> names;
  for (int rank = attempt.head.group_begin(group); rank < attempt.head.group_end(group); ++rank) {
    names.push_back(attempt_receipt_name(attempt.head, rank));
  }
  remove_files(*attempt.location, names);
}

// `left`: by rank, the results of AttemptReceipt::encode().
AllLeft decode_left(const Attempt& attempt, const std::vector<Bytes>& left) {
  AllLeft all;
  for (const Bytes& bytes : left) {
    const int group = attempt.head.group_of(static_cast<int>(all.left.size()));
    all.left.push_back(AttemptReceipt::decode(bytes, group_name(attempt.id(), group)));
    all.receipts.push_back(Receipt::decode(all.left.back().receipt));
    all.encoded.push_back(std::move(all.left.back().receipt));
  }
  return all;
}

}  // namespace

// Looks first for the group that was missing before.
bool all_merged(Attempt& attempt) {
  const int count = attempt.head.group_count();
  for (int i = 0; i < count; ++i) {
    const int group = (attempt.next_group + i) % count;
    if (attempt.location->stat(group_name(attempt.id(), group))) continue;
    attempt.next_group = group;
    return false;
  }
  return true;
}

bool merge_groups(Attempt& attempt, std::optional<int> group, BeforeMerging before, int threads,
                  Deadline deadline) {
  if (group) {
    const Merged merged = merge_group(attempt, *group, before, threads, deadline);
    if (merged == Merged::kIncomplete) return false;
    if (all_merged(attempt)) return true;
    if (merged == Merged::kNow) remove_receipts(attempt, *group);
    return false;
  }
  while (!all_merged(attempt)) {
    const int missing = attempt.next_group;
    if (merge_group(attempt, missing, before, threads, deadline) == Merged::kIncomplete) {
      return false;
    }
  }
  return true;
}

std::optional<AllLeft> read_merged(const Attempt& attempt) {
  std::vector<Bytes> left;
  for (int group = 0; group < attempt.head.group_count(); ++group) {
    auto merged = read_group(*attempt.location, attempt.head, group);
    if (!merged) return std::nullopt;
    std::move(merged->begin(), merged->end(), std::back_inserter(left));
  }
  return decode_left(attempt, left);
}

NewIndex describe_left(const Attempt& attempt, AllLeft all, std::set<std::string> remains) {
  const AttemptHead& head = attempt.head;
  ReplicaNames replicas;
  for (const AttemptReceipt& one : all.left) merge_replica_names(replicas, one.replicas);
  SaveToIndex save{.receipts = std::move(all.receipts),
                   .encoded = all.encoded,
                   .copies = CopyPolicy::kAccept,
                   .save_id = head.save_id,
                   .writer = head.writer,
                   .attributes = head.attributes,
                   .of_dialect = files_of_dialect(attempt, all.left.front()),
                   .remains = std::move(remains),
                   .replicas = std::move(replicas)};
  try {
    return describe_save(std::move(save), *attempt.format, *attempt.dialect);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kMismatch && error.key().empty()) expect_declared(all);
    throw;
  }
}

NewIndex describe_checked(const Attempt& attempt, AllLeft all) {
  expect_same_lists(attempt, all);
  expect_same_keys(all);
  expect_all_objects(all);
  expect_same_contents(attempt, all);
  return describe_left(attempt, std::move(all), {});
}

std::optional<Error> contradiction(const Attempt& attempt) {
  try {
    std::vector<Bytes> left;
    for (int group = 0; group < attempt.head.group_count(); ++group) {
      for (std::optional<Bytes>& one : counted_receipts(*attempt.location, attempt.head, group)) {
        if (!one) return std::nullopt;
        left.push_back(*std::move(one));
      }
    }
    describe_checked(attempt, decode_left(attempt, left));
    return std::nullopt;
  } catch (const Error& error) {
    if (!prevents_publishing(error.code())) throw;
    return error;
  }
}

void expect_files_of_merged(const Attempt& attempt, int threads, Deadline deadline) {
  Storage& storage = *attempt.location;
  if (read_outcome(storage, attempt.id())) return;  // a later save may have removed them
  std::vector<Receipt> receipts;
  for (int group = 0; group < attempt.head.group_count(); ++group) {
    const auto merged = read_group(storage, attempt.head, group);
    if (!merged) continue;  // merging looks for its files
    for (const Bytes& left : *merged) {
      const std::string name = group_name(attempt.id(), group);
      receipts.push_back(Receipt::decode(AttemptReceipt::decode(left, name).receipt));
    }
  }
  expect_files(storage, receipts, threads, deadline);
}

}  // namespace tilestone::engine
