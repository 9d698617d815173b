// Saves without a communicator.
//
// Each rank derives the attempt's save id by itself (save_id_of). It leaves its receipt, or its
// error, as a small file. A process that finds all receipts merges and publishes them.
//
//  1. Join. The first rank refuses a location that has a checkpoint, makes the attempt's directory
//     and publishes its head. The other ranks compare their own terms with the head. The head is
//     durable before any data file is written: it serves as the note that the save began here.
//  2. Until it has reported, each rank shows by a lease that it is working. It writes data files
//     under new names, syncs them and their directory, and publishes its receipt under its own
//     name, never over another receipt. If a rank was restarted, its first receipt counts, and the
//     data files of the other run are leftovers. (attempt_receipts.cc)
//  3. A process that finds all receipts of a group opens every data file that they name, merges the
//     receipts into one file, and then removes them. From then on the group's file decides which
//     receipts count. A process that finds all groups' files merges them, checks coverage, and
//     publishes the manifest. Several processes may do so at the same time: they write the same
//     bytes. A publisher's lease shows that one is at work, so that waiting ranks don't all start.
//  4. The publisher makes the outcome "published", unless there is an outcome. If that is
//     "abandoned", the save is over.
//  5. It publishes the index's switch, never over another one. The rename is the commit. A process
//     that finds the outcome "published" and no switch does this step. (For an index of several
//     files, as in Megatron-Core's dialect, see attempt_fixed_names.cc.)
//  6. It notes in the outcome that the switch was published, and removes head and directory.
//
// To abandon an attempt means to make the outcome "abandoned" before any of its files are removed.
// abandon() (gc's --abandon) does so only if the attempt was seen unchanged for a period and can't
// be published, because a receipt is missing or the receipts contradict each other. In torch's
// rank-local mode, the next number under the same token also does so, only if a rank has failed and
// none has begun to write (end_earlier_try).
//
// Races:
//  - Two publishers: the outcome is made once, and the switch is never replaced. The second
//    publisher finds the switch with its own save id.
//  - A publisher that stalls: before step 4, it finds "abandoned" when it continues. The outcome is
//    never removed, so it can't be made again. Between steps 4 and 5, others publish. In step 5, it
//    finds another checkpoint's switch, or its temporary file is gone with the directory; then it
//    changes nothing.
//  - A receipt that comes late: after "abandoned", no process merges it. Its data files are
//    leftovers because of the outcome.
//  - A rank that stalls while it reports: others may publish and remove its receipt before it
//    continues. It removes its data files only if it finds another receipt that counts.
//  - A rank tries again after a failure: when it joins, it removes the failure that it has left.
//    The others may find that failure first. So a rank that waits ignores for some seconds a
//    failure that was there when it joined; one that is left later counts at once. The failure of a
//    rank outside the world, which was refused, is removed by any rank that joins.
//  - Two attempts: names contain the save id, so neither attempt touches the other's files. The
//    first switch counts, and the other attempt ends with kAlreadyExists. If one of them is
//    rank-local, the second is refused when it joins.
//  - Saves with a communicator: one that begins later refuses while an attempt is open. One that
//    began before holds the lock, and the attempt refuses to begin. If both begin at once, at least
//    one sees the other: the save looks for attempts after it has taken the lock, and the attempt's
//    first rank looks for the lock after it has published its head. Where the storage has no locks,
//    the save with a communicator looks for attempts once more just before its switch.
//
// A crash at any point: before step 5 there is no switch, and the location had no checkpoint
// before. Receipts that are durable count, and their ranks need not write again. In step 5 all
// files that the switch names are durable, because a receipt is published after its data, and the
// manifest before the switch. A file that another process made may not be synced yet, so it is
// synced before any step relies on it.
#include "tilestone/engine/commit/attempt_internal.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/lease_internal.h"
#include "tilestone/engine/commit/presence_internal.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/detect_internal.h"
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
  // While this rank stalls here, a second run of it and the other ranks may have completed the
  // save.
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
  if (!is_published()) fail_no_checkpoint();
  return true;
}

void Attempt::begin(Deadline deadline) {
  try {
    refuse_other_attempts(deadline);
    refuse_existing();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    // If another rank has begun the attempt meanwhile, the refused files may be that rank's
    // metadata.
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
  // On failure expect_still_free() removes the head, so only the rank that made it may call this.
  if (is_first) expect_still_free(deadline);
}

void Attempt::refuse_existing() const {
  const std::string at = location_->describe();
  const auto refuse = [&](const std::string& what, const std::string& hint) {
    throw Error(ErrorCode::kAlreadyExists, what + " " + at).with_hint(hint);
  };
  const std::vector<std::string> names = location_->list();
  const auto other = find_foreign(
      names, [&](const std::string& name) { return read_file(*location_, name, UINT64_MAX); });
  if (other || any_checkpoint(*location_, *format_)) {
    refuse("a checkpoint exists at",
           "a save without a communicator can't replace a checkpoint: save elsewhere");
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

// Syncs the head, because the rank that made it may have died before it was durable.
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
                                          " here, " + there + " on the rank that began the save")
        .with_file(attempt_name(head_.save_id))
        .with_hint("use one token per run of a job, and the same options on all its ranks");
  };
  differ("world_size", std::to_string(head_.world_size), std::to_string(other.world_size));
  differ("format", head_.format, other.format);
  differ("dialect", head_.dialect, other.dialect);
  differ("the version", head_.writer, other.writer);
  differ("torch_rank_local", head_.rank_local ? "true" : "false",
         other.rank_local ? "true" : "false");
  const auto differing = [](const AttemptHead& head) {
    return differing_text(static_cast<Checks::Differing>(head.common_differs));
  };
  differ("checks.common_differs", differing(head_), differing(other));
  differ("attributes", attributes_text(head_.attributes), attributes_text(other.attributes));
  differ("the token", std::to_string(head_.token), std::to_string(other.token));
  differ("number", std::to_string(head_.number), std::to_string(other.number));
}

// ---- Steps 3 to 6

// Looks first for the receipt that was missing before: as long as many are missing, one look is
// usually enough.
bool Attempt::all_left(int group) {
  const int begin = head_.group_begin(group), count = head_.group_end(group) - begin;
  const int first = head_.group_of(next_rank_) == group ? next_rank_ - begin : 0;
  for (int i = 0; i < count; ++i) {
    const int rank = begin + (first + i) % count;
    if (location_->stat(attempt_receipt_name(head_, rank))) continue;
    next_rank_ = rank;
    return false;
  }
  return true;
}

// Looks first for the group that was missing before.
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
  const auto current = [&] {
    return location_->stat(name) ? Merged::kBefore : Merged::kIncomplete;
  };
  if (location_->stat(name)) return Merged::kBefore;
  if (!all_left(group)) return current();
  std::vector<Bytes> left;
  std::vector<Receipt> receipts;
  for (int rank = head_.group_begin(group); rank < head_.group_end(group); ++rank) {
    const std::string file = attempt_receipt_name(head_, rank);
    auto bytes = read_if_there(*location_, file);
    if (!bytes) return current();
    receipts.push_back(Receipt::decode(AttemptReceipt::decode(*bytes, file).receipt));
    if (receipts.back().rank != rank || receipts.back().save_id != head_.save_id) {
      throw Error(ErrorCode::kCorrupt, "the file has the receipt of rank " +
                                           std::to_string(receipts.back().rank) + " of the save " +
                                           receipts.back().save_id)
          .with_file(file);
    }
    left.push_back(std::move(*bytes));
  }
  expect_files(*location_, receipts, threads, deadline);
  if (!head_.rank_local) refuse_rank_metadata(head_.group_begin(group), head_.group_end(group));
  if (head_.rank_local) {
    for (Receipt& receipt : receipts) publish_rank_file(std::move(receipt), deadline);
    location_->sync_directory("");
  }
  location_->sync_directory(group_directory(head_.save_id, group));
  publish_once(name, group_temporary(head_.save_id, group, "merged"), encode_group(left), deadline);
  return Merged::kNow;
}

// Removes a merged group's receipts, so that the publisher need not remove those of all ranks.
void Attempt::remove_receipts(int group) const {
  std::vector<std::string> names;
  for (int rank = head_.group_begin(group); rank < head_.group_end(group); ++rank) {
    names.push_back(attempt_receipt_name(head_, rank));
  }
  remove_files(*location_, names);
}

bool Attempt::is_published() const {
  if (!has_stood(*location_, head_.save_id)) return false;
  if (!location_->stat(manifest_name(head_.save_id))) fail_no_checkpoint();
  return true;
}

// Also does step 6, if the publisher died before it.
bool Attempt::is_published_and_clean() const {
  if (!is_published()) return false;
  if (location_->stat(attempt_name(head_.save_id))) clean();
  return true;
}

// Another save's switch was published first and gc has removed this save's files, or a later save
// has replaced the checkpoint.
void Attempt::fail_no_checkpoint() const {
  throw Error(ErrorCode::kAlreadyExists, "the save " + head_.save_id +
                                             " has ended, and its checkpoint does not exist at " +
                                             location_->describe())
      .with_file(outcome_name(head_.save_id))
      .with_hint("save under another token or number, to a path that has no checkpoint");
}

// Whether files of the attempt are gone because it was published: just now, or earlier with step 6
// interrupted.
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
    if (merged == Merged::kNow) remove_receipts(*group);
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
    // Another process has published it meanwhile, and removed the files that this call was reading.
    if (error.code() != ErrorCode::kAlreadyExists && is_published()) return true;
    throw;
  }
}

void Attempt::expect_same_keys(const std::vector<AttemptReceipt>& left) {
  std::vector<int> other_keys;
  for (size_t rank = 1; rank < left.size(); ++rank) {
    const auto number = static_cast<int>(rank);
    if (left[rank].common_keys != left[0].common_keys) other_keys.push_back(number);
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
void Attempt::expect_all_objects(const std::vector<AttemptReceipt>& left,
                                 const std::vector<Receipt>& receipts) {
  std::set<std::string_view> written;
  for (const Receipt& receipt : receipts) {
    for (const Receipt::Object& object : receipt.objects) written.insert(object.key);
  }
  for (size_t rank = 0; rank < left.size(); ++rank) {
    for (const std::string& key : left[rank].unwritten_objects) {
      if (written.contains(key)) continue;
      throw Error(ErrorCode::kCoverage,
                  "rank " + std::to_string(rank) + " has a replica of an object that no rank wrote")
          .with_key(key)
          .with_rank(static_cast<int>(rank))
          .with_hint("set its replica_id to 0 on exactly one of the ranks that have it");
    }
  }
}

void Attempt::report_differing(const std::string& what, int rank) const {
  if (head_.common_differs == static_cast<uint8_t>(Checks::Differing::kError)) {
    throw Error(ErrorCode::kMismatch, what).with_rank(rank);
  }
  if (head_.common_differs == static_cast<uint8_t>(Checks::Differing::kIgnore)) return;
  log(LogLevel::kWarning, what);
}

// nullopt: not all groups are merged.
std::optional<Attempt::Described> Attempt::describe() const {
  std::vector<Bytes> left;
  for (int group = 0; group < head_.group_count(); ++group) {
    auto merged = read_group(*location_, head_, group);
    if (!merged) return std::nullopt;
    std::move(merged->begin(), merged->end(), std::back_inserter(left));
  }
  return describe(left);
}

std::optional<Error> Attempt::contradiction() const {
  try {
    std::vector<Bytes> left;
    for (int group = 0; group < head_.group_count(); ++group) {
      for (std::optional<Bytes>& one : counted_receipts(*location_, head_, group)) {
        if (!one) return std::nullopt;
        left.push_back(*std::move(one));
      }
    }
    describe(left);
    return std::nullopt;
  } catch (const Error& error) {
    if (!is_final(error.code())) throw;
    return error;
  }
}

Attempt::Described Attempt::describe(const std::vector<Bytes>& left_by_rank) const {
  std::vector<AttemptReceipt> left;
  std::vector<Receipt> receipts;
  std::vector<Bytes> encoded;
  for (const Bytes& bytes : left_by_rank) {
    const int group = head_.group_of(static_cast<int>(left.size()));
    left.push_back(AttemptReceipt::decode(bytes, group_name(head_.save_id, group)));
    receipts.push_back(Receipt::decode(left.back().receipt));
    encoded.push_back(std::move(left.back().receipt));
  }
  Described described;
  std::set<std::string> remains;
  ReplicaNames replicas;
  for (const AttemptReceipt& one : left) merge_replica_names(replicas, one.replicas);
  expect_same_lists(left);
  if (head_.rank_local) {
    described.replaced = rank_files_of(receipts);
    remains = unite_objects(receipts, encoded);
  } else {
    expect_same_keys(left);
    expect_all_objects(left, receipts);
    expect_same_contents(left, receipts);
  }
  try {
    described.made = describe_save(
        {std::move(receipts), encoded, CopyPolicy::kAccept, head_.save_id, head_.writer,
         head_.attributes, files_of_dialect(left.front()), std::move(remains), std::move(replicas)},
        *format_, *dialect_);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kMismatch && error.key().empty()) expect_declared(left, encoded);
    throw;
  }
  return described;
}

void Attempt::expect_publishable(int threads, Deadline deadline) {
  if (!merge_groups(std::nullopt, threads, deadline)) return;
  expect_files_of_merged(threads, deadline);
  describe();
  if (head_.rank_local) return;
  const Standing standing = read_standing(*location_, format_);
  if (standing.found && standing.save_id != head_.save_id) fail_no_checkpoint();
}

bool Attempt::publish(Deadline deadline) {
  std::optional<Lease> lease;
  lease.emplace(location_, publisher_name(head_.save_id),
                attempt_temporary(head_.save_id, "publisher"), kPublisherInterval);
  const auto described = describe();
  if (!described) return false;  // another process has published it, and is removing the groups
  const auto& [made, replaced] = *described;
  if (replaced) expect_only(*replaced);
  if (!replaced) refuse_rank_metadata(0, head_.group_end(0));
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

// Accepts an existing file, because every process publishes the same bytes under this name.
void Attempt::publish_once(const std::string& name, const std::string& temp_name, ByteView bytes,
                           Deadline deadline) const {
  try {
    location_->publish(name, temp_name, bytes, false, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    // The process that made it may have died before it was durable.
    location_->sync_directory(name.substr(0, name.rfind('/')));
  }
}

// False: a file with other bytes has this name.
bool Attempt::publish_or_find(const IndexFile& file, Deadline deadline) const {
  try {
    location_->publish(file.name, attempt_temporary(head_.save_id, base_of(file.name)), file.bytes,
                       false, deadline);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kAlreadyExists) throw;
    if (read_if_there(*location_, file.name) != file.bytes) return false;
    location_->sync_directory("");  // the process that made it may have died before its sync
  }
  return true;
}

void Attempt::clean() const {
  try {
    note_stood(*location_, head_.save_id, Deadline::never());
    remove_files(*location_, std::vector{attempt_name(head_.save_id)});
    location_->remove_tree(attempt_directory(head_.save_id));
  } catch (const Error& error) {
    // Other processes may be reading the directory, or cleaning too.
    log(LogLevel::kDebug, std::string("files of a published save stay for now: ") + error.what());
  }
}

// ---- Looking

AttemptState Attempt::look(size_t names) const {
  return look_at(*location_, head_, names,
                 [&](const std::string& name) { return location_->stat(name).has_value(); });
}

}  // namespace tilestone::engine
