// Saves without a communicator in torch's rank-local mode (ByFiles::torch_rank_local). Each rank
// writes everything that it holds, so no rank needs to know what another one wrote. The protocol of
// attempt.cc changes as follows:
//
//  1. Join, as there. Also refused if another save without a communicator has begun that has
//     neither failed nor was abandoned.
//  2. As there. Then the rank publishes `__RANK.metadata`, never over another file. It is made from
//     the receipt that counts, so that two runs of a rank make the same file.
//  3. A process that finds all receipts of a group publishes its ranks' missing metadata, and then
//     the group's file. Once all groups' files exist, the location has a rank-local checkpoint. No
//     further step is taken without a request. The attempt's files stay, so that readers know how
//     many ranks there are, and whose metadata is missing.
//  4. On request (publish()) it becomes an ordinary checkpoint. The receipts are merged: the lowest
//     rank's replica counts, the others become copies. The manifest is published, then the note
//     (kReplacedName) that the save of this id replaces exactly these rank-local files, then
//     outcome and switch as in steps 4 and 5 there.
//  5. The ranks' metadata is removed, the directory is synced, and the note is removed. Then step 6
//     as there.
//
// A crash at any point: before the switch of step 4 the rank-local checkpoint exists, and readers
// ignore the note, because it is about a save whose `.metadata` does not exist. After the switch,
// readers use `.metadata` because of the note; another call of publish() does the remaining steps,
// and so does gc.
//
// Who ends an attempt by a failure, or abandons it, removes its ranks' metadata. Who has published
// metadata looks for the outcome, and then does so too; if it dies before, readers
// refuse the metadata because of the outcome. Once all ranks have written, no failure ends the
// attempt: the checkpoint exists.
//
// An ordinary save refuses to begin beside an open rank-local one, and to be published beside a
// rank's metadata. Each of the two looks for the other first. If both are published at the same
// instant all the same, the directory has both kinds, and readers refuse it.
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/commit/work_claim_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/rank_local_internal.h"

namespace tilestone::engine {
namespace {

// ---- Steps 2 and 3

void publish_rank_file(const Attempt& attempt, Receipt receipt, Deadline deadline) {
  const IndexFile file = describe_rank(std::move(receipt), *attempt.format);
  if (read_if_there(*attempt.location, file.name) == file.bytes) return;
  const std::string whole = attempt.format->encode_index(Metadata()).front().name;
  // All ranks' metadata existed, and publish() has been called since.
  if (read_outcome(*attempt.location, attempt.id()) == Outcome::kPublished) return;
  if (attempt.location->stat(whole)) fail_not_first(attempt, whole);
  if (!publish_or_find(attempt, file, deadline)) fail_not_first(attempt, file.name);
}

// After metadata was published: the attempt may have failed meanwhile.
void withdraw_if_abandoned(const Attempt& attempt) {
  if (read_outcome(*attempt.location, attempt.id()) != Outcome::kAbandoned) return;
  withdraw_rank_metadata(attempt);
  fail_abandoned(attempt);
}

void publish_group_metadata(const Attempt& attempt, std::vector<Receipt> receipts,
                            Deadline deadline) {
  for (Receipt& receipt : receipts) publish_rank_file(attempt, std::move(receipt), deadline);
  attempt.location->settle("");
  withdraw_if_abandoned(attempt);
}

// ---- Steps 4 and 5

struct DescribedRankLocal {
  NewIndex made;
  Replaced replaced;  // the ranks' metadata
};
// nullopt: another process has published it, and is removing the groups.
std::optional<DescribedRankLocal> describe_rank_local(const Attempt& attempt, Look look,
                                                      int threads, Deadline deadline) {
  auto all = read_merged(attempt);
  if (!all) return std::nullopt;
  expect_files_again(attempt, *all, look, threads, deadline);
  expect_same_lists(attempt, *all);
  Replaced replaced{attempt.id(), {}};
  for (const Receipt& receipt : all->receipts) {
    const IndexFile file = describe_rank(receipt, *attempt.format);
    replaced.files.emplace(file.name, xxh3_64(file.bytes));
  }
  DroppedObjects dropped = drop_equal_objects(all->receipts);
  for (size_t rank = 0; rank < all->receipts.size(); ++rank) {
    all->encoded[rank] = all->receipts[rank].encode();
  }
  if (dropped.rank >= 0) report_differing(attempt, dropped.differing, dropped.rank);
  return DescribedRankLocal{describe_left(attempt, *std::move(all), std::move(dropped.remains)),
                            std::move(replaced)};
}

// Refuses if metadata of ranks exists that `replaced` does not list: beside it the new index would
// be ambiguous.
void expect_only(const Attempt& attempt, const Replaced& replaced) {
  for (const std::string& name : attempt.format->rank_local_files(attempt.location->list_files())) {
    const auto own = replaced.files.find(name);
    const auto bytes = read_if_there(*attempt.location, name);
    if (!bytes || (own != replaced.files.end() && xxh3_64(*bytes) == own->second)) continue;
    throw Error(ErrorCode::kAlreadyExists, "the metadata of a rank does not belong to the save " +
                                               attempt.id() + ", or is damaged")
        .with_file(name)
        .with_hint(
            "if it is only damaged, remove it and publish again: the receipt of its rank is kept; "
            "if a later save wrote it, the older save can't be published");
  }
}

// Removes the note last, and only once all files that it lists are gone.
void remove_replaced(Storage& storage, const Replaced& replaced) {
  std::vector<std::string> names;
  for (const auto& [name, hash] : replaced.files) {
    if (storage.stat(name)) names.push_back(name);
  }
  if (!remove_files(storage, names)) return;
  storage.settle("");
  const std::string note(kReplacedName);
  if (storage.stat(note)) remove_files(storage, std::vector{note});
}

// False: another process has published it.
bool publish_united(const Attempt& attempt, Look look, int threads, Deadline deadline) {
  Storage& storage = *attempt.location;
  {
    if (!has_begun(attempt)) return false;
    const WorkClaim claim(attempt.location, publisher_claim(attempt.id()));
    const auto described = describe_rank_local(attempt, look, threads, deadline);
    if (!described) return false;
    const auto& [made, replaced] = *described;
    expect_only(attempt, replaced);
    publish_manifest(attempt, made.manifest, deadline);
    storage.publish(std::string(kReplacedName), attempt_temporary(attempt.id(), "replaced"),
                    replaced.encode(), true, deadline);
    publish_index(attempt, made.index, deadline);
    remove_replaced(storage, replaced);
  }
  clean(attempt);
  return true;
}

}  // namespace

void publish_rank_metadata(const Attempt& attempt, int rank, Deadline deadline) {
  Storage& storage = *attempt.location;
  if (read_outcome(storage, attempt.id()) == Outcome::kAbandoned) fail_abandoned(attempt);
  const auto left = receipt_of(attempt, rank);
  if (!left && switch_is_published(attempt)) return;
  if (!left) {
    throw Error(ErrorCode::kNotFound, "a rank's receipt is gone")
        .with_file(attempt.meeting->file_of(rank));
  }
  publish_rank_file(attempt, Receipt::decode(left->receipt), deadline);
  storage.settle("");  // the process that made it may have died before its sync
  withdraw_if_abandoned(attempt);
}

bool merge_rank_local(const Attempt& attempt, Look look, int threads, Deadline deadline) {
  outcome_is_published(attempt);  // throws if it was abandoned
  if (switch_is_published(attempt)) return true;
  const auto publish_or_end = [](const Attempt& of, std::vector<Receipt> receipts, Deadline until) {
    check_or_end(of, [&] { publish_group_metadata(of, std::move(receipts), until); });
  };
  return unless_published(
      attempt, [&] { return merge_groups(attempt, look, publish_or_end, threads, deadline); });
}

void wait_merged_rank_local(const Attempt& attempt, int threads, Deadline deadline) {
  wait_complete(attempt, true, merge_rank_local, threads, deadline);
}

bool publish_rank_local_if_complete(const Attempt& attempt, Look look, int threads,
                                    Deadline deadline) {
  if (is_finished(attempt)) return true;
  return unless_published(attempt, [&] {
    if (!merge_groups(attempt, look, publish_group_metadata, threads, deadline)) {
      return was_published(attempt);
    }
    return publish_united(attempt, look, threads, deadline) || switch_is_published(attempt);
  });
}

void withdraw_rank_metadata(const Attempt& attempt) {
  Storage& storage = *attempt.location;
  std::vector<std::string> names;
  int rank = 0;
  for (const std::optional<Bytes>& left : attempt.meeting->messages_so_far()) {
    const std::string file = attempt.meeting->file_of(rank++);
    if (!left) continue;
    const IndexFile own = describe_rank(
        Receipt::decode(AttemptReceipt::decode(*left, file).receipt), *attempt.format);
    if (read_if_there(storage, own.name) == own.bytes) names.push_back(own.name);
  }
  if (names.empty()) return;
  remove_files(storage, names);
  storage.settle("");
}

}  // namespace tilestone::engine
