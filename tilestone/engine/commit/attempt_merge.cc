// Step 3 of the protocol in attempt.cc: the receipts of a group are merged, then those of all
// groups, and what they say is described.
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/commit/presence_internal.h"

namespace tilestone::engine {
namespace {

Receipt checked_receipt(const Attempt& attempt, int rank, ByteView encoded) {
  Receipt receipt = Receipt::decode(encoded);
  if (receipt.rank == rank && receipt.save_id == attempt.id()) return receipt;
  throw Error(ErrorCode::kCorrupt, "the file has the receipt of rank " +
                                       std::to_string(receipt.rank) + " of the save " +
                                       receipt.save_id)
      .with_file(attempt.meeting->file_of(rank));
}

// `messages`: of adjacent ranks from `first` on, the results of AttemptReceipt::encode().
AllLeft decode_left(const Attempt& attempt, const std::vector<Bytes>& messages, int first = 0) {
  AllLeft all;
  for (const Bytes& bytes : messages) {
    const int rank = first + static_cast<int>(all.left.size());
    all.left.push_back(AttemptReceipt::decode(bytes, attempt.meeting->file_of(rank)));
    all.receipts.push_back(checked_receipt(attempt, rank, all.left.back().receipt));
    all.encoded.push_back(std::move(all.left.back().receipt));
  }
  return all;
}

}  // namespace

bool merge_groups(const Attempt& attempt, Look look, BeforeMerging before, int threads,
                  Deadline deadline) {
  const auto check = [&](int first, std::span<const std::optional<Bytes>> messages) {
    std::vector<Bytes> left;
    for (const std::optional<Bytes>& one : messages) left.push_back(*one);
    std::vector<Receipt> receipts = decode_left(attempt, left, first).receipts;
    expect_files(*attempt.location, receipts, threads, deadline);
    before(attempt, std::move(receipts), deadline);
  };
  StoreCommunicator& meeting = *attempt.meeting;
  if (look != Look::kOwn) return meeting.is_complete(deadline, check);
  // Of the processes that complete a group, the last one sees that all are joined.
  return meeting.group_is_complete(deadline, check) &&
         (!meeting.has_groups() || meeting.all_joined());
}

std::optional<AllLeft> read_merged(const Attempt& attempt) {
  const auto messages = attempt.meeting->take();
  return messages ? std::optional(decode_left(attempt, *messages)) : std::nullopt;
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

}  // namespace tilestone::engine
