// Saves without a communicator. Each rank derives the attempt's save id by itself (save_id_of). It
// leaves its receipt, or its error, as a small file. Who finds all receipts publishes them.
//
//  1. Join. The first rank refuses a location that has a checkpoint, makes the attempt's directory
//     and publishes its head. The other ranks compare their own terms with the head. The head is
//     durable before any data file is written: it serves as the note that the save began here.
//  2. Until it has reported, each rank shows by a claim that it works. It writes data files, whose
//     names are new, syncs them and their directory, and leaves its receipt in the gather of the
//     attempt's StoreCommunicator, durably. If a rank was restarted, its first receipt counts, and
//     the data files of the other run are leftovers. (attempt_receipts.cc)
//  3. A process that finds all receipts of a group opens every data file that they name, and joins
//     them. A process that finds all groups joined merges their receipts, checks coverage, and
//     publishes the manifest. Several processes may do so at the same time: they write the same
//     bytes. A publisher's claim shows that one is at work, so that waiting ranks don't all start.
//  4. The publisher makes the outcome "published", unless there is an outcome. If that is
//     "abandoned", the save is over.
//  5. It publishes the index's switch, never over another one. The rename is the commit. A process
//     that finds the outcome "published" and no switch does this step. (For an index of several
//     files, as in Megatron-Core's dialect, see attempt_publish.cc.)
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
//    finds another checkpoint's switch. Or others have published and cleaned: before it renames a
//    temporary file it looks for the head, which goes before the directory. Either the head is
//    gone, or the temporary file will be gone when it is renamed. Then it changes nothing.
//  - A receipt that comes late: after "abandoned", no process merges it. Its data files are
//    leftovers because of the outcome.
//  - A rank that stalls while it reports: others may publish and remove its receipt before it
//    continues. It removes its data files only if another receipt counts: one that it finds, or,
//    once the save has ended, the one in the manifest. It may have made the attempt's directory
//    again, so who finds that the save is over removes it.
//  - A try after a failure. Rank 1 fails, leaves the file `failed`, and is started again. When it
//    joins, it removes that file. Rank 0 may be started again before that, and finds the file: its
//    reason is out of date. So a rank that waits ignores for some seconds a failure that was there
//    when it joined. A failure that is left later ends its wait at once. If a rank outside the
//    world was refused and left the failure, any rank that joins removes it.
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

#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

template <typename Work>
void try_to_clean(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    // Other processes may be reading the directory, or cleaning too.
    log(LogLevel::kDebug, std::string("files of a published save stay for now: ") + error.what());
  }
}

}  // namespace

Attempt::Attempt(std::shared_ptr<Storage> at, AttemptHead terms, int rank)
    : location(std::move(at)),
      head(std::move(terms)),
      format(format_named(head.format)),
      dialect(save_dialect_named(head.dialect)),
      meeting(std::make_shared<StoreCommunicator>(meeting_of(*location, head, rank))) {}

bool prevents_publishing(ErrorCode code) {
  return code == ErrorCode::kMismatch || code == ErrorCode::kCoverage ||
         code == ErrorCode::kInvalidArgument || code == ErrorCode::kCorrupt ||
         code == ErrorCode::kAlreadyExists;
}

bool has_begun(const Attempt& attempt) {
  return attempt.location->stat(attempt_name(attempt.id())).has_value();
}

void fail_abandoned(const Attempt& attempt) {
  throw Error(ErrorCode::kRankFailed, "the save " + attempt.id() + " was abandoned")
      .with_file(outcome_name(attempt.id()))
      .with_hint("save again under another token, or to another path");
}

void fail_no_checkpoint(const Attempt& attempt) {
  throw Error(ErrorCode::kAlreadyExists, "the save " + attempt.id() +
                                             " has ended, and its checkpoint does not exist at " +
                                             attempt.location->describe())
      .with_file(outcome_name(attempt.id()))
      .with_hint("save under another token or number, to a path that has no checkpoint");
}

bool outcome_is_published(const Attempt& attempt) {
  const auto outcome = read_outcome(*attempt.location, attempt.id());
  if (outcome == Outcome::kAbandoned) fail_abandoned(attempt);
  return outcome == Outcome::kPublished;
}

bool switch_is_published(const Attempt& attempt) {
  if (!switch_was_noted(*attempt.location, attempt.id())) return false;
  if (!attempt.location->stat(manifest_name(attempt.id()))) fail_no_checkpoint(attempt);
  return true;
}

bool is_finished(const Attempt& attempt) {
  if (!outcome_is_published(attempt)) return false;
  const bool published = switch_is_published(attempt);
  if (has_begun(attempt)) {
    if (published) clean(attempt);
    return published;
  }
  if (!published && !switch_is_published(attempt)) fail_no_checkpoint(attempt);
  const std::string directory = attempt_directory(attempt.id());
  try_to_clean([&] {
    if (attempt.location->stat(directory)) attempt.location->remove_tree(directory);
  });
  return true;
}

bool was_published(const Attempt& attempt) {
  if (!outcome_is_published(attempt)) return false;
  if (is_finished(attempt)) return true;
  const ExistingCheckpoint existing = read_existing(*attempt.location, attempt.format);
  if (!existing.found || existing.save_id != attempt.id()) return false;
  if (!existing.rank_local.empty()) return false;
  clean(attempt);
  return true;
}

void clean(const Attempt& attempt) {
  try_to_clean([&] {
    note_switch(*attempt.location, attempt.id(), Deadline::never());
    remove_files(*attempt.location, std::vector{attempt_name(attempt.id())});
    attempt.location->remove_tree(attempt_directory(attempt.id()));
  });
}

}  // namespace tilestone::engine
