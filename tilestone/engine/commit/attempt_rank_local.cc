// Saves without a communicator in torch's rank-local mode (ByFiles::torch_rank_local). Each rank
// writes everything that it holds, so no rank needs to know what another one wrote. The protocol of
// attempt.cc changes as follows:
//
//  1. Join, as there. Also refused if another save without a communicator has begun. Exception: an
//     earlier number under this token that failed before any rank wrote is ended instead.
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
// An attempt that is abandoned removes its ranks' metadata. A rank that stalls before its rename
// may still publish its own afterwards: readers refuse it because of the outcome.
//
// An ordinary save refuses to begin beside an open rank-local one, and to be published beside a
// rank's metadata. Each of the two looks for the other first. If both are published at the same
// instant all the same, the directory has both kinds, and readers refuse it.
#include <algorithm>
#include <map>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/rank_local_internal.h"
#include "tilestone/engine/run/terms_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kNamedObjects = 4;

}  // namespace

// A damaged head does not prevent this save: if its ranks have published metadata,
// refuse_rank_metadata() finds that before the switch.
bool Attempt::may_be_open_beside(const std::string& save_id) const {
  if (head_.rank_local) return false;
  try {
    const auto head = read_head(*location_, save_id);
    return !head || !head->rank_local;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    return true;
  }
}

// A rank-local attempt must be the only open one. Ordinary ones may be open side by side.
void Attempt::refuse_other_attempts(Deadline deadline) const {
  const std::vector<std::string> names = location_->list(std::string(kOwnDirectory) + "/");
  for (const std::string& other : read_notes(*location_, names).open(false)) {
    if (other == head_.save_id || may_be_open_beside(other)) continue;
    if (end_earlier_try(other, deadline)) continue;
    throw Error(ErrorCode::kAlreadyExists, "the save " + other + " at " + location_->describe() +
                                               ", without a communicator, is not published yet")
        .with_file(attempt_name(other))
        .with_hint(
            "save elsewhere, or end that save: `tilestone publish`, or `tilestone gc "
            "--abandon` if its ranks are dead");
  }
}

// Abandons an earlier number under this token, if one of its ranks has failed and none has begun to
// write. One of its ranks has come to this attempt, so the earlier one can't be completed. A rank
// that still comes to it gets an error because of the outcome.
bool Attempt::end_earlier_try(const std::string& save_id, Deadline deadline) const {
  const auto head = read_head(*location_, save_id);
  if (!head || head->token != head_.token || head->number >= head_.number) return false;
  const std::string directory = attempt_directory(save_id) + "/";
  bool has_failed = false;
  for (const std::string& name : location_->list(directory)) {
    has_failed |= name == failed_name(save_id);
    // A file in a group's directory is a lease, a receipt or a temporary file of one.
    if (name.find('/', directory.size()) != std::string::npos) return false;
  }
  if (!has_failed) return false;
  if (decide(*location_, save_id, Outcome::kAbandoned, deadline) != Outcome::kAbandoned) {
    return false;
  }
  // A rank may have joined it since the directory was listed.
  if (head->rank_local) Attempt(location_, *head).withdraw_rank_metadata();
  return true;
}

// Refuses if one of these ranks has metadata here, of another save or copied: beside an ordinary
// index it would be ambiguous. The rank that begins a save lists the location, which is fresh then.
// Later a listing would have an entry for each rank, so the names are asked for: those of a group
// when it is merged, and those of the first group again before the switch.
void Attempt::refuse_rank_metadata(int begin, int end) const {
  for (int rank = begin; rank < end; ++rank) {
    const std::string name = format_->rank_index_name(rank);
    if (name.empty()) return;
    if (!location_->stat(name)) continue;
    throw Error(ErrorCode::kAlreadyExists, "the save " + head_.save_id + " can't be published at " +
                                               location_->describe() +
                                               ": metadata of a rank-local save is there")
        .with_file(name)
        .with_hint(
            "save elsewhere, or move those files away; then `tilestone publish` completes the "
            "save");
  }
}

// ---- Steps 2 and 3

void Attempt::publish_rank_metadata(int rank, Deadline deadline) {
  if (read_outcome(*location_, head_.save_id) == Outcome::kAbandoned) fail_abandoned();
  const std::string name = attempt_receipt_name(head_, rank);
  const auto bytes = counted_receipt(*location_, head_, rank);
  if (!bytes && is_published()) return;
  if (!bytes) throw Error(ErrorCode::kNotFound, "a rank's receipt is gone").with_file(name);
  publish_rank_file(Receipt::decode(AttemptReceipt::decode(*bytes, name).receipt), deadline);
  location_->sync_directory("");  // the process that made it may have died before its sync
}

void Attempt::publish_rank_file(Receipt receipt, Deadline deadline) const {
  const IndexFile file = describe_rank(std::move(receipt), *format_);
  const auto standing = read_if_there(*location_, file.name);
  if (standing == file.bytes) return;
  const std::string whole = format_->encode_index(Metadata()).front().name;
  // All ranks' metadata existed, and publish() has been called since.
  if (read_outcome(*location_, head_.save_id) == Outcome::kPublished) return;
  if (location_->stat(whole)) fail_not_first(whole);
  if (!publish_or_find(file, deadline)) fail_not_first(file.name);
}

bool Attempt::merge_if_complete(std::optional<int> group, int threads, Deadline deadline) {
  if (read_outcome(*location_, head_.save_id) == Outcome::kAbandoned) fail_abandoned();
  if (is_published()) return true;
  try {
    return merge_groups(group, threads, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists && is_published()) return true;
    throw;
  }
}

// ---- Steps 4 and 5

std::set<std::string> Attempt::unite_objects(std::vector<Receipt>& receipts,
                                             std::vector<Bytes>& encoded) const {
  std::map<std::string, int> differing;  // key -> the first rank whose object differs
  std::set<std::string> remains = drop_equal_objects(
      receipts, [&](const std::string& key, int, int rank) { differing.emplace(key, rank); });
  for (size_t rank = 0; rank < receipts.size(); ++rank) encoded[rank] = receipts[rank].encode();
  if (differing.empty()) return remains;
  std::string what = std::to_string(differing.size()) +
                     " objects differ between ranks, and the lowest rank's is saved:";
  size_t named = 0;
  for (const auto& [key, rank] : differing) {
    if (named++ == kNamedObjects) break;
    what += (named == 1 ? " " : ", ") + key + " (rank " + std::to_string(rank) + ")";
  }
  report_differing(what, differing.begin()->second);
  return remains;
}

Replaced Attempt::rank_files_of(const std::vector<Receipt>& receipts) const {
  Replaced replaced{head_.save_id, {}};
  for (const Receipt& receipt : receipts) {
    const IndexFile file = describe_rank(receipt, *format_);
    replaced.files.emplace(file.name, xxh3_64(file.bytes));
  }
  return replaced;
}

// Refuses if metadata of ranks exists that `replaced` does not list: beside it the new index would
// be ambiguous.
void Attempt::expect_only(const Replaced& replaced) const {
  for (const std::string& name : format_->rank_local_files(location_->list_files())) {
    const auto own = replaced.files.find(name);
    const auto bytes = read_if_there(*location_, name);
    if (!bytes || (own != replaced.files.end() && xxh3_64(*bytes) == own->second)) continue;
    throw Error(ErrorCode::kAlreadyExists, "the metadata of a rank does not belong to the save " +
                                               head_.save_id + ", or is damaged")
        .with_file(name)
        .with_hint(
            "if it is only damaged, remove it and publish again: the receipt of its rank is kept; "
            "if a later save wrote it, the older save can't be published");
  }
}

void Attempt::mark_replaced(const Replaced& replaced, Deadline deadline) const {
  location_->publish(std::string(kReplacedName), attempt_temporary(head_.save_id, "replaced"),
                     replaced.encode(), true, deadline);
}

// Removes the note last, and only once all files that it lists are gone.
void Attempt::remove_replaced(const Replaced& replaced) const {
  std::vector<std::string> names;
  for (const auto& [name, hash] : replaced.files) {
    if (location_->stat(name)) names.push_back(name);
  }
  if (!remove_files(*location_, names)) return;
  location_->sync_directory("");
  if (location_->stat(std::string(kReplacedName))) {
    remove_files(*location_, std::vector{std::string(kReplacedName)});
  }
}

// ---- Ended without a checkpoint

void Attempt::withdraw_rank_metadata() {
  std::vector<std::string> names;
  for (int group = 0; group < head_.group_count(); ++group) {
    int rank = head_.group_begin(group);
    for (const std::optional<Bytes>& left : counted_receipts(*location_, head_, group)) {
      const std::string file = attempt_receipt_name(head_, rank++);
      if (!left) continue;
      const IndexFile own =
          describe_rank(Receipt::decode(AttemptReceipt::decode(*left, file).receipt), *format_);
      if (read_if_there(*location_, own.name) == own.bytes) names.push_back(own.name);
    }
  }
  if (names.empty()) return;
  remove_files(*location_, names);
  location_->sync_directory("");
}

}  // namespace tilestone::engine
