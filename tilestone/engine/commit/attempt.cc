// Saves without a communicator.
//
// Every rank works out the attempt's save id by itself (save_id_of). It leaves its report, or its
// error, as a small file; who finds all reports there merges and publishes them.
//
//  1. Join. The first rank that comes refuses a location where a checkpoint stands, makes the
//     attempt's directory and publishes its head; the others compare what they bring with it. A
//     head is durable before any data file: it is the note that the save began here.
//  2. Each rank shows by a lease that it works until it has reported. It writes data files under
//     new names, syncs them and their directory, and publishes its report under a name of its own,
//     never over another: of a rank that was started again, the first report counts, and the files
//     of the other are leftovers. (attempt_reports.cc)
//  3. Who finds all reports of a group puts them together in one file, having opened every data
//     file that they name, and then removes them: from now on the group's file says which reports
//     count. Who finds all groups merges them, checks coverage, and publishes the manifest. Several
//     may do so at a time: what they write is the same, bytes for bytes. A lease says that somebody
//     is at it, so that ranks that wait don't all begin the same.
//  4. It makes the outcome "published", unless there is one. If it is "abandoned", the save is
//     over.
//  5. It publishes the index's switch, never over another. The rename is the commit. Who finds the
//     outcome "published" and no switch does this step. (An index of several files, as
//     Megatron-Core's dialect has it: attempt_fixed_names.cc.)
//  6. It notes in the outcome that the switch stood, and removes head and directory.
//
// To abandon an attempt is to make the outcome "abandoned" before any of its files go. abandon()
// (gc's --abandon) does, only where the attempt has been seen unchanged for a period and can't be
// published: a report is missing, or the reports contradict each other. So does, in torch's
// rank-local mode, the next number under the same token, only where a rank has failed and none has
// begun to write (end_earlier_try).
//
// Races:
//  two publishers           The outcome is made once, and the switch is never replaced: the second
//                           finds it there with its own save id.
//  a publisher that stalls  Before 4 it finds "abandoned" when it goes on; the outcome stays for
//                           good, so it can't be made once more. Between 4 and 5 others publish. In
//                           5 it finds another checkpoint's switch, or its temporary file gone with
//                           the directory, and changes nothing.
//  a report that comes late After "abandoned" nobody merges it. Its data files are leftovers, as
//                           the outcome says.
//  a rank that stalls while it reports
//                           Others may publish, and remove its report, before it goes on. It
//                           removes its data files only where it finds another report that counts.
//  a try after a failure    A rank takes its own failure back when it has come again; anyone that
//                           of a rank outside the world, which was refused. Whoever came before
//                           that ignores for some seconds what it found there; what is left later
//                           counts at once.
//  two attempts             Names hold their save ids, so neither sees the other; the first switch
//                           stands, the other attempt ends with kAlreadyExists. Where one of them
//                           is rank-local, the second is refused when it joins.
//  saves with a communicator
//                           One that begins later refuses while an attempt is open. One that began
//                           before holds the lock, and an attempt refuses to begin. Where both
//                           began at once, one of the two sees the other: the one looks for
//                           attempts once it has the lock, the attempt's first rank for the lock
//                           once its head stands. Where the storage has no locks, the save with a
//                           communicator looks for attempts once more just before its switch.
//
// A crash at any point: before 5 there is no switch, and nothing was there before; the reports that
// are durable count, and their ranks need not write again. In 5 the switch names files that are all
// durable: a report is published after its data, the manifest before the switch. What somebody else
// has made, and may not have synced, is synced before anything is built on it.
#include "tilestone/engine/commit/attempt_internal.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/commit/lease_internal.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/format/foreign.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kPublisherInterval{1};

std::string base_of(const std::string& name) {
  const std::string last = name.substr(name.rfind('/') + 1);
  return last.substr(std::min(last.find_first_not_of('.'), last.size()));
}

}  // namespace

Attempt::Attempt(std::shared_ptr<Storage> location, AttemptHead head)
    : location_(std::move(location)),
      head_(std::move(head)),
      format_(format_named(head_.format)),
      dialect_(save_dialect_named(head_.dialect)) {}

void Attempt::fail_abandoned() const {
  throw Error(ErrorCode::kRankFailed, "the save " + head_.save_id + " was abandoned")
      .with_file(outcome_name(head_.save_id))
      .with_hint("save again under another token, or to another path");
}

bool Attempt::is_final(ErrorCode code) {
  return code == ErrorCode::kMismatch || code == ErrorCode::kCoverage ||
         code == ErrorCode::kInvalidArgument || code == ErrorCode::kCorrupt ||
         code == ErrorCode::kAlreadyExists;
}

bool Attempt::has_begun() const { return location_->stat(attempt_name(head_.save_id)).has_value(); }

// ---- Step 1

bool Attempt::join(Deadline deadline) {
  old_failure_ = read_if_there(*location_, failed_name(head_.save_id), kMaxSmallFile);
  if (is_over()) return false;
  if (const auto begun = read_head(*location_, head_.save_id)) {
    join_begun(*begun);
    return true;
  }
  // A rank that stalls here may find that its twin and the others have come to the end meanwhile.
  try {
    begin(deadline);
  } catch (const Error&) {
    if (is_over()) return false;
    throw;
  }
  return !is_over();
}

bool Attempt::is_over() const {
  const auto outcome = read_outcome(*location_, head_.save_id);
  if (outcome == Outcome::kAbandoned) fail_abandoned();
  if (outcome != Outcome::kPublished) return false;
  if (is_published_and_clean()) return true;
  if (location_->stat(attempt_name(head_.save_id))) return false;
  if (!is_published()) fail_not_standing();
  return true;
}

void Attempt::begin(Deadline deadline) {
  try {
    refuse_other_attempts(deadline);
    refuse_standing();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    // Another rank has begun it meanwhile, and what stands may be its own metadata.
    const auto begun = read_head(*location_, head_.save_id);
    if (!begun) throw;
    return join_begun(*begun);
  }
  make_head(deadline);
}

void Attempt::make_head(Deadline deadline) {
  bool is_first = true;
  location_->make_directory("");
  location_->make_directory(std::string(kOwnDirectory));
  location_->make_directory(attempt_directory(head_.save_id));
  try {
    location_->publish(attempt_name(head_.save_id), attempt_temporary(head_.save_id, "attempt"),
                       head_.encode(), false, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    const auto begun = read_head(*location_, head_.save_id);
    if (begun) join_begun(*begun);
    if (!begun && !is_published()) throw;
    is_first = false;
  }
  location_->sync_directory("");
  // The head of a rank that came first is not to be taken away.
  if (is_first) expect_still_free(deadline);
}

void Attempt::refuse_standing() const {
  const std::string at = location_->describe();
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    throw Error(ErrorCode::kAlreadyExists, what + " " + at).with_hint(hint);
  };
  const std::vector<std::string> names = location_->list();
  const auto other = find_foreign(
      names, [&](const std::string& name) { return read_file(*location_, name, UINT64_MAX); });
  if (other || any_checkpoint(*location_, *format_)) {
    refuse("a checkpoint stands at",
           "saves without a communicator don't replace any: save elsewhere");
  }
  refuse_fixed_names(names);
  bool locked = false;
  try {
    locked = location_->is_locked(std::string(kLockName));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
  }
  if (locked) refuse("a save with a communicator is under way at", "save elsewhere");
}

// Whoever made the head may have died before it was durable.
void Attempt::join_begun(const AttemptHead& begun) const {
  expect_same_head(begun);
  location_->sync_directory(std::string(kOwnDirectory));
  location_->sync_directory("");
}

void Attempt::expect_same_head(const AttemptHead& other) const {
  if (other == head_) return;
  const auto differ = [&](const std::string& what, const std::string& here,
                          const std::string& there) {
    if (here == there) return;
    throw Error(ErrorCode::kMismatch, "the ranks of a save don't agree on " + what + ": " + here +
                                          " here, " + there + " where it began")
        .with_file(attempt_name(head_.save_id))
        .with_hint("one token stands for one run of a job, and all its ranks save alike");
  };
  differ("world_size", std::to_string(head_.world_size), std::to_string(other.world_size));
  differ("format", head_.format, other.format);
  differ("dialect", head_.dialect, other.dialect);
  differ("the version", head_.writer, other.writer);
  differ("torch_rank_local", head_.rank_local ? "true" : "false",
         other.rank_local ? "true" : "false");
  const auto differing = [](const AttemptHead& head) {
    return differing_text(static_cast<SaveOptions::Differing>(head.common_differs));
  };
  differ("common_differs", differing(head_), differing(other));
  differ("attributes", attributes_text(head_.attributes), attributes_text(other.attributes));
  differ("the token", std::to_string(head_.token), std::to_string(other.token));
  differ("number", std::to_string(head_.number), std::to_string(other.number));
}

// ---- Steps 3 to 6

// Looks first where a report was missing before: while many are, it finds one at once.
bool Attempt::all_reported(int group) {
  const int begin = head_.group_begin(group), count = head_.group_end(group) - begin;
  const int first = head_.group_of(next_rank_) == group ? next_rank_ - begin : 0;
  for (int i = 0; i < count; ++i) {
    const int rank = begin + (first + i) % count;
    if (location_->stat(report_name(head_, rank))) continue;
    next_rank_ = rank;
    return false;
  }
  return true;
}

// Likewise.
bool Attempt::all_merged() {
  const int count = head_.group_count();
  for (int i = 0; i < count; ++i) {
    const int group = (next_group_ + i) % count;
    if (location_->stat(group_name(head_.save_id, group))) continue;
    next_group_ = group;
    return false;
  }
  return true;
}

Attempt::Merged Attempt::merge_group(int group, int threads, Deadline deadline) {
  const std::string name = group_name(head_.save_id, group);
  const auto standing = [&] {
    return location_->stat(name) ? Merged::kBefore : Merged::kIncomplete;
  };
  if (location_->stat(name)) return Merged::kBefore;
  if (!all_reported(group)) return standing();
  std::vector<Bytes> left;
  std::vector<RankReport> reports;
  for (int rank = head_.group_begin(group); rank < head_.group_end(group); ++rank) {
    const std::string file = report_name(head_, rank);
    auto bytes = read_if_there(*location_, file);
    if (!bytes) return standing();
    reports.push_back(RankReport::decode(LeftReport::decode(*bytes, file).report));
    if (reports.back().rank != rank || reports.back().save_id != head_.save_id) {
      throw Error(ErrorCode::kCorrupt, "it is the report of rank " +
                                           std::to_string(reports.back().rank) + " of the save " +
                                           reports.back().save_id)
          .with_file(file);
    }
    left.push_back(std::move(*bytes));
  }
  expect_files(*location_, reports, threads, deadline);
  if (head_.rank_local) {
    for (RankReport& report : reports) publish_rank_file(std::move(report), deadline);
    location_->sync_directory("");
  }
  location_->sync_directory(group_directory(head_.save_id, group));
  publish_once(name, group_temporary(head_.save_id, group, "merged"), encode_group(left), deadline);
  return Merged::kNow;
}

// So that who publishes need not remove those of all ranks.
void Attempt::remove_reports(int group) const {
  std::vector<std::string> names;
  for (int rank = head_.group_begin(group); rank < head_.group_end(group); ++rank) {
    names.push_back(report_name(head_, rank));
  }
  remove_files(*location_, names);
}

bool Attempt::is_published() const {
  if (!has_stood(*location_, head_.save_id)) return false;
  if (!location_->stat(manifest_name(head_.save_id))) fail_not_standing();
  return true;
}

// Where who has published it died before it had cleaned, this does.
bool Attempt::is_published_and_clean() const {
  if (!is_published()) return false;
  if (location_->stat(attempt_name(head_.save_id))) clean();
  return true;
}

// Another save's switch has come first, and gc then; or the checkpoint was replaced.
void Attempt::fail_not_standing() const {
  throw Error(ErrorCode::kAlreadyExists, "the save " + head_.save_id +
                                             " has ended, and its checkpoint does not stand at " +
                                             location_->describe())
      .with_file(outcome_name(head_.save_id))
      .with_hint("save under another token or number, to a path where no checkpoint stands");
}

// Whether files of the attempt are gone because it was published: just now, or before, and step 6
// was interrupted.
bool Attempt::ended_before() const {
  if (read_outcome(*location_, head_.save_id) != Outcome::kPublished) return false;
  if (is_over()) return true;
  const Standing standing = read_standing(*location_, format_);
  if (!standing.found || standing.save_id != head_.save_id) return false;
  if (!standing.rank_local.empty()) return false;
  clean();
  return true;
}

bool Attempt::merge_groups(std::optional<int> group, int threads, Deadline deadline) {
  if (group) {
    const Merged merged = merge_group(*group, threads, deadline);
    if (merged == Merged::kIncomplete) return false;
    if (all_merged()) return true;
    if (merged == Merged::kNow) remove_reports(*group);
    return false;
  }
  while (!all_merged()) {
    if (merge_group(next_group_, threads, deadline) == Merged::kIncomplete) return false;
  }
  return true;
}

bool Attempt::finish(std::optional<int> group, int threads, Deadline deadline) {
  return head_.rank_local ? merge_if_complete(group, threads, deadline)
                          : publish_if_complete(group, threads, deadline);
}

bool Attempt::publish_if_complete(std::optional<int> group, int threads, Deadline deadline) {
  if (is_over()) return true;
  try {
    if (!merge_groups(group, threads, deadline)) return ended_before();
    return publish(deadline) || is_published();
  } catch (const Error& error) {
    // Somebody else has published it meanwhile, and removed what this call was reading.
    if (error.code() != ErrorCode::kAlreadyExists && is_published()) return true;
    throw;
  }
}

void Attempt::expect_one_common_state(const std::vector<LeftReport>& left) const {
  std::vector<int> other_keys, other_contents;
  for (size_t rank = 1; rank < left.size(); ++rank) {
    const auto number = static_cast<int>(rank);
    if (left[rank].common_keys != left[0].common_keys) other_keys.push_back(number);
    const bool compared = left[rank].common_contents != 0 && left[0].common_contents != 0;
    if (compared && left[rank].common_contents != left[0].common_contents) {
      other_contents.push_back(number);
    }
  }
  if (!other_keys.empty()) {
    throw Error(ErrorCode::kMismatch,
                ranks_text(other_keys) + ": other objects than on rank 0, which alone writes them")
        .with_rank(other_keys.front())
        .with_hint("give an object that only some ranks have a key of its own (ShardedObject)");
  }
  if (other_contents.empty()) return;
  const std::string ranks = ranks_text(other_contents);
  const std::string what =
      dialect_->common_object().empty()
          ? "objects that every rank has are not the same on " + ranks + " as on rank 0, whose are"
          : "the common state of " + ranks + " is not that of rank 0, which is";
  tell_of_differing(what + " saved", other_contents.front());
}

// One of which no rank has the main replica would be missing, and nothing would say so.
void Attempt::expect_all_objects(const std::vector<LeftReport>& left,
                                 const std::vector<RankReport>& reports) {
  std::set<std::string_view> written;
  for (const RankReport& report : reports) {
    for (const RankReport::Object& object : report.objects) written.insert(object.key);
  }
  for (size_t rank = 0; rank < left.size(); ++rank) {
    for (const std::string& key : left[rank].unwritten_objects) {
      if (written.contains(key)) continue;
      throw Error(ErrorCode::kCoverage,
                  "rank " + std::to_string(rank) + " has a copy of an object, and no rank wrote it")
          .with_key(key)
          .with_rank(static_cast<int>(rank))
          .with_hint("on one of the ranks that have it, its replica_id is 0");
    }
  }
}

void Attempt::tell_of_differing(const std::string& what, int rank) const {
  if (head_.common_differs == static_cast<uint8_t>(SaveOptions::Differing::kError)) {
    throw Error(ErrorCode::kMismatch, what).with_rank(rank);
  }
  if (head_.common_differs == static_cast<uint8_t>(SaveOptions::Differing::kIgnore)) return;
  log(LogLevel::kWarning, what);
}

std::optional<Attempt::Described> Attempt::describe() const {
  std::vector<LeftReport> left;
  std::vector<RankReport> reports;
  std::vector<Bytes> encoded;
  for (int group = 0; group < head_.group_count(); ++group) {
    const auto merged = read_group(group);
    if (!merged) return std::nullopt;
    for (const Bytes& bytes : *merged) {
      left.push_back(LeftReport::decode(bytes, group_name(head_.save_id, group)));
      reports.push_back(RankReport::decode(left.back().report));
      encoded.push_back(std::move(left.back().report));
    }
  }
  Described described;
  std::set<std::string> remains;
  ReplicaNames replicas;
  for (const LeftReport& one : left) merge_replica_names(replicas, one.replicas);
  if (head_.rank_local) {
    described.replaced = rank_files_of(reports);
    remains = unite_objects(reports, encoded);
  } else {
    expect_one_common_state(left);
    expect_all_objects(left, reports);
  }
  described.made = describe_save(
      {std::move(reports), encoded, CopyPolicy::kAccept, head_.save_id, head_.writer,
       head_.attributes, files_of_dialect(left.front()), std::move(remains), std::move(replicas)},
      *format_, *dialect_);
  return described;
}

void Attempt::expect_publishable(int threads, Deadline deadline) {
  if (!merge_groups(std::nullopt, threads, deadline)) return;
  describe();
  if (head_.rank_local) return;
  const Standing standing = read_standing(*location_, format_);
  if (standing.found && standing.save_id != head_.save_id) fail_not_standing();
}

bool Attempt::publish(Deadline deadline) {
  std::optional<Lease> lease;
  lease.emplace(location_, publisher_name(head_.save_id),
                attempt_temporary(head_.save_id, "publisher"), kPublisherInterval);
  const auto described = describe();
  if (!described) return false;  // somebody else has published it, and is removing the groups
  const auto& [made, replaced] = *described;
  if (replaced) expect_only(*replaced);
  if (!replaced) refuse_rank_metadata();
  location_->sync_directory(attempt_directory(head_.save_id));
  publish_once(manifest_name(head_.save_id), attempt_temporary(head_.save_id, "manifest"),
               made.manifest, deadline);
  if (replaced) mark_replaced(*replaced, deadline);
  if (decide(*location_, head_.save_id, Outcome::kPublished, deadline) == Outcome::kAbandoned) {
    fail_abandoned();
  }
  publish_index(made.index, deadline.without_interrupt());
  if (replaced) remove_replaced(*replaced);
  lease.reset();
  clean();
  return true;
}

// The bytes are the same, whoever publishes them.
void Attempt::publish_once(const std::string& name, const std::string& temp_name, ByteView bytes,
                           Deadline deadline) const {
  try {
    location_->publish(name, temp_name, bytes, false, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    // Whoever made it may have died before it was durable.
    location_->sync_directory(name.substr(0, name.rfind('/')));
  }
}

// False: another one stands there.
bool Attempt::publish_or_find(const IndexFile& file, Deadline deadline) const {
  try {
    location_->publish(file.name, attempt_temporary(head_.save_id, base_of(file.name)), file.bytes,
                       false, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    if (read_if_there(*location_, file.name) != file.bytes) return false;
    location_->sync_directory("");  // whoever made it may have died before
  }
  return true;
}

void Attempt::clean() const {
  try {
    note_stood(*location_, head_.save_id, Deadline::never());
    remove_files(*location_, std::vector{attempt_name(head_.save_id)});
    location_->remove_tree(attempt_directory(head_.save_id));
  } catch (const Error& error) {
    // Others may be looking into it, or cleaning too.
    log(LogLevel::kDebug, std::string("files of a published save stay for now: ") + error.what());
  }
}

// ---- Looking

AttemptState Attempt::look(size_t names) const {
  return look_at(*location_, head_, names,
                 [&](const std::string& name) { return location_->stat(name).has_value(); });
}

}  // namespace tilestone::engine
