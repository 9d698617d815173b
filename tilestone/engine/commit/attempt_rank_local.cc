// Saves without a communicator in torch's rank-local mode (ByFiles::torch_rank_local). Ranks write
// all that they hold, so none has to know what another wrote, and the protocol of attempt.cc
// becomes:
//
//  1. Join, as there; refused too where another save without a communicator has begun, unless that
//     is an earlier number under this token that has failed before anything was written: it ends.
//  2. As there. Then the rank publishes `__RANK.metadata`, never over another. It is made of the
//     report that counts, so that two lives of a rank make the same.
//  3. Who finds all reports of a group publishes what is missing of its ranks' metadata, and then
//     the group's file. Once all groups' files are there, a rank-local checkpoint stands: nothing
//     else happens by itself. The attempt's files stay, so that readers know how many ranks there
//     are, and whose metadata is missing.
//  4. On request (publish()) it becomes an ordinary checkpoint: the reports are merged, of replicas
//     the lowest rank's counts and the others become copies. The manifest is published; then the
//     note (kReplacedName) which says that the save of this id replaces exactly these rank-local
//     files; then outcome and switch as in 4 and 5 there.
//  5. The ranks' metadata goes, the directory is synced, and the note goes; then 6 as there.
//
// A crash at any point: before the switch of 4 the rank-local checkpoint stands, and the note says
// nothing, since it speaks of a save whose `.metadata` is not there. From the switch on readers
// take `.metadata`, by the note; who calls publish() again does what is left, and so does gc.
//
// An attempt that is abandoned takes back its ranks' metadata. A rank that stalls before its rename
// may still leave its own: readers refuse it by the outcome.
//
// An ordinary save refuses to begin beside an open rank-local one, and to be published beside a
// rank's metadata. If both are published at the same instant all the same, both kinds are there:
// each looks for the other first, and readers refuse such a directory.
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

// A damaged head says nothing: what its ranks have published is found in the end
// (refuse_rank_metadata).
bool Attempt::may_stand_beside(const std::string& save_id) const {
  if (head_.rank_local) return false;
  try {
    const auto head = read_head(*location_, save_id);
    return !head || !head->rank_local;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    return true;
  }
}

// A rank-local attempt stands alone; ordinary ones may stand side by side.
void Attempt::refuse_other_attempts(Deadline deadline) const {
  const std::vector<std::string> names = location_->list(std::string(kOwnDirectory) + "/");
  for (const std::string& other : read_notes(*location_, names).open(false)) {
    if (other == head_.save_id || may_stand_beside(other)) continue;
    if (end_earlier_try(other, deadline)) continue;
    throw Error(ErrorCode::kAlreadyExists, "the save " + other + " at " + location_->describe() +
                                               ", without a communicator, is not published yet")
        .with_file(attempt_name(other))
        .with_hint(
            "save elsewhere, or end that save: `tilestone publish`, or `tilestone gc "
            "--abandon` if its ranks are dead");
  }
}

// An earlier number under this token, of which a rank has failed and none has begun to write, is
// over for its ranks, one of which has come here: it is abandoned, and whoever might still come to
// it hears so.
bool Attempt::end_earlier_try(const std::string& save_id, Deadline deadline) const {
  const auto head = read_head(*location_, save_id);
  if (!head || head->token != head_.token || head->number >= head_.number) return false;
  const std::string directory = attempt_directory(save_id) + "/";
  bool has_failed = false;
  for (const std::string& name : location_->list(directory)) {
    has_failed |= name == failed_name(save_id);
    // In a group: a lease, a report, or what is to become one.
    if (name.find('/', directory.size()) != std::string::npos) return false;
  }
  if (!has_failed) return false;
  if (decide(*location_, save_id, Outcome::kAbandoned, deadline) != Outcome::kAbandoned) {
    return false;
  }
  // A rank may have come to it since that look.
  if (head->rank_local) Attempt(location_, *head).withdraw_rank_metadata();
  return true;
}

// Of another save, or copied here: beside an ordinary index they would be ambiguous.
void Attempt::refuse_rank_metadata() const {
  const std::string of_rank_0 = format_->rank_index_name(0);
  if (of_rank_0.empty()) return;
  const std::string prefix = of_rank_0.substr(0, of_rank_0.find('0'));
  const auto standing = format_->rank_local_files(location_->list_files(prefix));
  if (standing.empty()) return;
  throw Error(ErrorCode::kAlreadyExists,
              "the metadata of a rank, of a rank-local save, stands at " + location_->describe() +
                  " where the save " + head_.save_id + " is to be published")
      .with_file(standing.front())
      .with_hint(
          "save elsewhere, or move those files away, and `tilestone publish` completes the "
          "save");
}

// ---- Steps 2 and 3

void Attempt::publish_rank_metadata(int rank, Deadline deadline) {
  if (read_outcome(*location_, head_.save_id) == Outcome::kAbandoned) fail_abandoned();
  const std::string name = report_name(head_, rank);
  const auto bytes = counted_report(rank);
  if (!bytes && is_published()) return;
  if (!bytes) throw Error(ErrorCode::kNotFound, "a rank's report is gone").with_file(name);
  publish_rank_file(RankReport::decode(LeftReport::decode(*bytes, name).report), deadline);
  location_->sync_directory("");  // whoever made it may have died before
}

void Attempt::publish_rank_file(RankReport report, Deadline deadline) const {
  const IndexFile file = describe_rank(std::move(report), *format_);
  const auto standing = read_if_there(*location_, file.name);
  if (standing == file.bytes) return;
  const std::string whole = format_->encode_index(Metadata()).front().name;
  // publish() has been called once all ranks' metadata stood.
  if (read_outcome(*location_, head_.save_id) == Outcome::kPublished) return;
  if (location_->stat(whole)) fail_second({whole, {}});
  if (!publish_or_find(file, deadline)) fail_second(file);
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

std::set<std::string> Attempt::unite_objects(std::vector<RankReport>& reports,
                                             std::vector<Bytes>& encoded) const {
  std::map<std::string, int> differing;  // and the first rank where it does
  std::set<std::string> remains = drop_equal_objects(
      reports, [&](const std::string& key, int, int rank) { differing.emplace(key, rank); });
  for (size_t rank = 0; rank < reports.size(); ++rank) encoded[rank] = reports[rank].encode();
  if (differing.empty()) return remains;
  std::string what = std::to_string(differing.size()) +
                     " objects are not the same on all ranks, and the lowest rank's is saved:";
  size_t named = 0;
  for (const auto& [key, rank] : differing) {
    if (named++ == kNamedObjects) break;
    what += (named == 1 ? " " : ", ") + key + " (rank " + std::to_string(rank) + ")";
  }
  tell_of_differing(what, differing.begin()->second);
  return remains;
}

Replaced Attempt::rank_files_of(const std::vector<RankReport>& reports) const {
  Replaced replaced{head_.save_id, {}};
  for (const RankReport& report : reports) {
    const IndexFile file = describe_rank(report, *format_);
    replaced.files.emplace(file.name, xxh3_64(file.bytes));
  }
  return replaced;
}

// Beside others the new index would be ambiguous.
void Attempt::expect_only(const Replaced& replaced) const {
  for (const std::string& name : format_->rank_local_files(location_->list_files())) {
    const auto own = replaced.files.find(name);
    const auto bytes = read_if_there(*location_, name);
    if (!bytes || (own != replaced.files.end() && xxh3_64(*bytes) == own->second)) continue;
    throw Error(ErrorCode::kAlreadyExists,
                "the metadata of a rank stands here that is not of the save " + head_.save_id +
                    ", or is damaged")
        .with_file(name)
        .with_hint(
            "if it is only damaged, remove it and publish again: what its rank has reported is "
            "kept; if a later save wrote it, nothing of the older one can be published");
  }
}

void Attempt::mark_replaced(const Replaced& replaced, Deadline deadline) const {
  location_->publish(std::string(kReplacedName), attempt_temporary(head_.save_id, "replaced"),
                     replaced.encode(), true, deadline);
}

// The note goes last, and only when nothing is left that it speaks of.
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
    for (const std::optional<Bytes>& left : counted_reports(group)) {
      const std::string file = report_name(head_, rank++);
      if (!left) continue;
      const IndexFile own =
          describe_rank(RankReport::decode(LeftReport::decode(*left, file).report), *format_);
      if (read_if_there(*location_, own.name) == own.bytes) names.push_back(own.name);
    }
  }
  if (names.empty()) return;
  remove_files(*location_, names);
  location_->sync_directory("");
}

}  // namespace tilestone::engine
