// Saves without a communicator. Each rank derives the attempt's save id by itself (save_id_of), and
// plans by rule. Then the ranks meet by messages (comm/store_communicator.h) that are durable
// files: the head and the outcome are verdicts, the receipts are a gather.
//
//  1. Join. A rank that finds no head refuses a location that has a checkpoint, and leaves its
//     terms as the head. The terms that were left first count; ranks with others are refused. The
//     head is durable before any data file is written: it is the note that the save began here.
//  2. Until it has reported, a rank shows by a claim that it works. It writes data files, whose
//     names are new, syncs them and their directory, and leaves its receipt, durably. A rank that
//     was restarted finds its receipt and writes nothing; the data files of a second process of a
//     rank are leftovers. (attempt_receipts.cc)
//  3. A process that finds all receipts of a group opens every data file that they name, and joins
//     them. A process that finds all groups joined does what only one need do: it merges the
//     receipts, checks coverage, and publishes the manifest. Several may do so at the same time:
//     they write the same bytes. A publisher's claim shows that one is at work; who waits goes on
//     for it once the claim has lapsed.
//  4. The publisher leaves the outcome "published", unless there is an outcome.
//  5. It publishes the index's switch, never over another one. The rename is the commit. A process
//     that finds the outcome "published" and no switch does this step. (For an index of several
//     files, as in Megatron-Core's dialect, see attempt_publish.cc.)
//  6. It notes in the outcome that the switch was published, and removes head and directory.
//
// A failure is an outcome, too. A rank that can't join or write, or a publisher that finds that the
// receipts can't become a checkpoint (check_or_end), leaves its error as the outcome, unless
// there is one. So the save has failed for all ranks, with one error, and for good: a further try
// has another number or token. A rank that dies leaves no outcome and may come again. abandon()
// leaves the outcome "abandoned", if the attempt was seen unchanged for a period and a receipt is
// missing. Nothing of an attempt is removed before there is an outcome, but what a rank has written
// that has left no receipt.
//
// Races:
//  - Two publishers: the switch is never replaced. The second one finds it with its own save id.
//  - A publisher that stalls: before step 4, it finds the outcome when it continues. The outcome is
//    never removed, so it can't be made again. Between steps 4 and 5, others publish. In step 5, it
//    finds another checkpoint's switch. Or others have published and cleaned: before it renames a
//    temporary file it looks for the head, which goes before the directory. Either the head is
//    gone, or the temporary file will be gone when it is renamed. Then it changes nothing.
//  - A receipt that comes late: after a failure, no process merges it. Its data files are leftovers
//    because of the outcome.
//  - A rank that stalls while it reports: others may publish and remove its receipt before it
//    continues. It removes its data files only if another receipt counts: one that it finds, or,
//    once the save has ended, the one in the manifest; or if the save has failed. It may have made
//    the attempt's directory again, so who finds that the save is over removes it.
//  - Two attempts: names contain the save id, so neither attempt touches the other's files. The
//    first switch counts, and the other attempt fails with kAlreadyExists. If one of them is
//    rank-local, the second is refused when it joins.
//  - Saves with a communicator: one that begins later refuses while an attempt is open. One that
//    began before holds the lock, and the attempt refuses to begin. If both begin at once, at least
//    one sees the other: the save looks for attempts after it has taken the lock, and the attempt's
//    first rank looks for the lock after its head exists; then the attempt fails. Where the storage
//    has no locks, the save with a communicator looks once more just before its switch.
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

Attempt::Attempt(std::shared_ptr<Storage> at, AttemptHead terms, int number)
    : location(std::move(at)),
      head(std::move(terms)),
      rank(number),
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
  if (auto failed = read_failed(*attempt.location, attempt.id())) {
    throw std::move(*failed).with_hint("the save " + attempt.id() +
                                       " has failed; save again under another number or token");
  }
  throw Error(ErrorCode::kRankFailed, "the save " + attempt.id() + " was abandoned")
      .with_file(outcome_name(attempt.id()))
      .with_hint("save again under another number or token, or to another path");
}

void fail_no_checkpoint(const Attempt& attempt) {
  throw Error(ErrorCode::kAlreadyExists, "the save " + attempt.id() +
                                             " has ended, and its checkpoint does not exist at " +
                                             attempt.location->describe())
      .with_file(outcome_name(attempt.id()))
      .with_hint("save under another token or number, to a path that has no checkpoint");
}

bool end_failed(const Attempt& attempt, const Error& error, Deadline deadline) {
  Error left = error;
  if (attempt.rank >= 0) left.with_rank(attempt.rank);
  if (decide_failed(*attempt.location, attempt.id(), left, deadline) == Outcome::kPublished) {
    return false;
  }
  // This process may have other terms than the ranks that have begun the attempt.
  const auto begun = read_head(*attempt.location, attempt.id());
  if (begun && begun->rank_local) withdraw_rank_metadata(Attempt(attempt.location, *begun));
  return true;
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
