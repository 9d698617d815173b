// Saves without a communicator. Each rank derives the save's id by itself (save_id_of), and plans
// by rule. Then the ranks meet by messages (comm/store_communicator.h) that are durable files: the
// head and the outcome are verdicts, the receipts are a gather.
//
//  1. Join. A rank that finds no head refuses a location that has a checkpoint, and leaves its
//     terms as the head. The terms that were left first count; ranks with others are refused. The
//     head is durable before any data file is written: it is the note that the save began here.
//  2. Until it has reported, a rank shows by a claim that it works. It writes data files, whose
//     names are new, syncs them and their directory, and leaves its receipt. A rank that was
//     restarted finds its receipt and writes nothing; the data files of a second process of a rank
//     are leftovers.
//  3. The first rank that finds all receipts of its group, once it has left its own, opens every
//     data file that they name, and joins them. If it then finds all groups joined, it merges the
//     receipts, checks coverage, and publishes the manifest. If it dies, who waits goes on for it.
//     Several may do so at the same time: they write the same bytes. A publisher's claim shows that
//     one is at work; who waits goes on for it once it has lapsed.
//  4. The publisher leaves the outcome "published", unless there is an outcome.
//  5. It publishes the files of the index, never over another file (attempt_publish.cc). A process
//     that finds the outcome "published" and not all files does this step.
//  6. It notes in the outcome that all are there, and removes head and directory.
//
// In torch's rank-local mode each rank writes all that it holds, and the index is the metadata of
// each rank, made from its receipt. No manifest is made, and of step 6 only the note: the receipts
// stay for readers. On request, publish_rank_local.cc makes an ordinary checkpoint of it.
//
// A failure is an outcome, too. A rank that can't join or write, or a publisher that finds that the
// receipts can't become a checkpoint (check_or_end), leaves its error as the outcome. So the save
// has failed for all ranks, with one error, and for good: a further try has another number or
// token. Nothing of the index was made before. A rank that dies leaves no outcome and may come
// again. abandon() leaves the outcome "abandoned", if the attempt was seen unchanged for a period
// and a receipt is missing. Before there is an outcome, nothing is removed but what a rank has
// written that has left no receipt.
//
// Races:
//  - Two publishers: no file of the index is replaced. The second one finds its own bytes there.
//  - A publisher that stalls: others publish, and the checkpoint may be replaced or removed since.
//    Before it renames a temporary file it looks for the head, which goes before the directory.
//    Either the head is gone, or the temporary file will be gone when it is renamed. In an object
//    store it looks again once it has made a file: without a head, and without the note of step 6
//    or the manifest, it removes the file again.
//  - A rank that stalls while it reports: others may publish and remove its receipt before it
//    continues. It removes its data files only if another receipt counts: one that it finds, or,
//    once the save has ended, the one in the manifest; or if the save has failed.
//  - Two attempts: names contain the save id, so neither touches the other's files. The first
//    switch counts, and the other attempt fails with kAlreadyExists. A rank-local one must be
//    alone.
//  - Saves with a communicator: one that begins later refuses while an attempt is open. One that
//    began before holds the lock, and the attempt refuses to begin. If both begin at once, at least
//    one sees the other: the save looks for attempts after it has taken the lock, and the attempt's
//    first rank looks for the lock after its head exists; then the attempt fails. Where the storage
//    has no locks, the save with a communicator looks once more just before its switch.
//
// A crash at any point: before step 5 there is no index, and the location had no checkpoint before.
// Receipts that are durable count, and their ranks need not write again. In step 5 all files that
// the index names are durable. What another process made is synced before any step relies on it.
#include "tilestone/engine/commit/attempt_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/engine/open/message_files_internal.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/format/data_file_name.h"
#include "tilestone/format/foreign.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {

// ---- How it ends

namespace {

// Another save's switch was published first and gc has removed this save's files, or a later save
// has replaced the checkpoint.
[[noreturn]] void fail_no_checkpoint(const Attempt& attempt) {
  throw Error(ErrorCode::kAlreadyExists, "the save " + attempt.id() +
                                             " has ended, and its checkpoint does not exist at " +
                                             attempt.location->describe())
      .with_file(outcome_name(attempt.id()))
      .with_hint("save under another token or number, to a path that has no checkpoint");
}

}  // namespace

Attempt::Attempt(std::shared_ptr<Storage> at, AttemptHead terms, int number)
    : location(std::move(at)),
      head(std::move(terms)),
      rank(number),
      format(format_named(head.format)),
      dialect(save_dialect_named(head.dialect)),
      meeting(std::make_shared<StoreCommunicator>(meeting_of(*location, head, rank))) {}

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

bool end_failed(const Attempt& attempt, const Error& error, Deadline deadline) {
  Error left = error;
  if (attempt.rank >= 0) left.with_rank(attempt.rank);
  return decide(*attempt.location, attempt.id(), left, deadline) == Outcome::kAbandoned;
}

Phase phase_of(const Attempt& attempt) {
  Storage& storage = *attempt.location;
  const auto outcome = read_outcome(storage, attempt.id());
  if (!outcome) return Phase::kOpen;
  if (outcome == Outcome::kAbandoned) fail_abandoned(attempt);
  if (outcome == Outcome::kPublished) return Phase::kDecided;
  const bool stands =
      (attempt.head.rank_local && has_begun(attempt)) || storage.stat(manifest_name(attempt.id()));
  if (!stands) fail_no_checkpoint(attempt);
  return Phase::kPublished;
}

// Without a head, gc has removed what a publisher has left that died before it noted the switch.
bool is_finished(const Attempt& attempt) {
  const Phase phase = phase_of(attempt);
  if (phase == Phase::kOpen) return false;
  const bool stands =
      phase == Phase::kPublished ||
      (!has_begun(attempt) && holds_checkpoint_of(*attempt.location, attempt.format, attempt.id()));
  if (stands) clean(attempt);
  return stands;
}

// Other processes may be reading the directory, or cleaning too.
void clean(const Attempt& attempt) {
  try {
    note_switch(*attempt.location, attempt.id(), Deadline::never());
    if (attempt.head.rank_local) return;
    remove_files(*attempt.location, std::vector{attempt_name(attempt.id())});
    attempt.location->remove_tree(attempt_directory(attempt.id()));
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("files of a published save stay for now: ") + error.what());
  }
}

// ---- Joining

namespace {

// A rank-local attempt must be the only open one. Ordinary ones may be open side by side, also with
// one whose head is damaged.
bool may_be_open_beside(const Attempt& attempt, const std::string& save_id) {
  if (attempt.head.rank_local) return false;
  try {
    const auto head = read_head(*attempt.location, save_id);
    return !head || !head->rank_local;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    return true;
  }
}

void refuse_other_attempts(const Attempt& attempt, const Notes& notes) {
  for (const std::string& other : notes.open(false)) {
    if (other == attempt.id() || may_be_open_beside(attempt, other)) continue;
    throw Error(ErrorCode::kAlreadyExists, "the save " + other + " at " +
                                               attempt.location->describe() +
                                               ", without a communicator, is not published yet")
        .with_file(attempt_name(other))
        .with_hint(
            "save elsewhere, or end that save: `tilestone publish`, or `tilestone gc "
            "--abandon` if its ranks are dead");
  }
}

// Where files of the index have fixed names (attempt_publish.cc).
void refuse_fixed_names(const Attempt& attempt, const Standing& here) {
  Storage& storage = *attempt.location;
  const auto first =
      attempt.format->detect(here.names) ? partly_published_by(storage) : std::nullopt;
  if (first) {
    throw Error(ErrorCode::kAlreadyExists,
                "the save " + *first + " is being published at " + storage.describe())
        .with_hint("`tilestone publish` completes it if nobody does; save elsewhere");
  }
  if (!attempt.dialect->has_fixed_names()) return;
  for (const std::string& name : attempt.dialect->index_files(here.names)) {
    throw Error(ErrorCode::kAlreadyExists,
                "a file with a name that this save needs exists at " + storage.describe())
        .with_file(name)
        .with_hint("save elsewhere, or move the file: a failed save may have left it");
  }
}

void refuse_others(const Attempt& attempt) {
  Storage& storage = *attempt.location;
  const auto refuse = [&](const std::string& what, const std::string& hint,
                          const std::string& more = "") {
    throw Error(ErrorCode::kAlreadyExists, what + " " + storage.describe() + more).with_hint(hint);
  };
  const Standing here = look_at(storage, attempt.format);
  refuse_other_attempts(attempt, here.notes);
  if (here.is_removed) {
    refuse("a removal is under way at", "`tilestone gc` ends it if nobody does; save elsewhere");
  }
  if (here.foreign || here.found.format != nullptr) {
    refuse("a checkpoint exists at",
           "a save without a communicator can't replace a checkpoint: save elsewhere");
  }
  refuse_fixed_names(attempt, here);
  if (is_saved_to(storage)) {
    refuse("a save with a communicator is under way at", "save elsewhere", lock_holder(storage));
  }
}

Terms terms_of(const AttemptHead& head) {
  const auto differs = static_cast<Checks::Differing>(head.common_differs);
  return {{"world_size", std::to_string(head.world_size)},
          {"format", head.format},
          {"dialect", head.dialect},
          {"the version", head.writer},
          {"torch_rank_local", head.rank_local ? "true" : "false"},
          {"checks.common_differs", differing_text(differs)},
          {"attributes", attributes_text(head.attributes)}};
}

void expect_same_head(const Attempt& attempt, const AttemptHead& other) {
  const Terms here = terms_of(attempt.head), there = terms_of(other);
  const auto [own, first] = std::ranges::mismatch(here, there);
  if (own == here.end()) return;
  throw Error(ErrorCode::kMismatch, "the ranks of a save don't agree on " + own->first + ": " +
                                        own->second + " here, " + first->second +
                                        " on the rank that began the save")
      .with_file(attempt_name(attempt.id()))
      .with_hint("use one token per run of a job, and the same options on all its ranks");
}

// Leaves this rank's terms as the head, and returns the head that counts. Looks for other saves
// before, and again once the head exists: it may happen that neither of two continues. What is
// refused may be this save's: another rank has begun it meanwhile, or all have completed it.
AttemptHead begin(const Attempt& attempt, Deadline deadline) {
  Storage& storage = *attempt.location;
  try {
    refuse_others(attempt);
  } catch (const Error&) {
    if (auto begun = read_head(storage, attempt.id())) return *std::move(begun);
    throw;
  }
  storage.make_root();
  DurableMessages messages(attempt.location, attempt.id());
  bool is_first = false;  // or may be
  const Bytes counts = decide(messages, kHeadMessage, attempt.head.encode(), deadline, &is_first);
  if (!storage.facts().put_if_absent) {  // the put has shown it
    storage.remove(attempt_name(attempt.id()));
    throw Error(ErrorCode::kUnsupported, "ranks can't save by files to " + storage.describe() +
                                             ": the store has no conditional writes")
        .with_hint("save with a communicator");
  }
  try {
    if (is_first) refuse_others(attempt);
  } catch (const Error&) {
    if (!read_outcome(storage, attempt.id())) throw;
  }
  return AttemptHead::decode(counts, attempt_name(attempt.id()));
}

}  // namespace

// While this rank stalls, a second run of it and the other ranks may complete the save. Syncs the
// head, because the rank that made it may have died before it was durable.
bool join(const Attempt& attempt, Deadline deadline) {
  const bool is_over = is_finished(attempt);
  auto head = read_head(*attempt.location, attempt.id());
  try {
    if (!head && !is_over) head = begin(attempt, deadline);
  } catch (const Error&) {
    if (is_finished(attempt)) return false;
    throw;
  }
  if (head) expect_same_head(attempt, *head);
  if (is_over) return false;
  attempt.location->settle(std::string(kTilestoneDirectory));
  attempt.location->settle("");
  return !is_finished(attempt);
}

// ---- A rank's receipt

namespace {

Receipt decoded(const Attempt& attempt, int rank, ByteView message) {
  return Receipt::decode(AttemptReceipt::decode(message, attempt.meeting->file_of(rank)).receipt);
}

}  // namespace

int first_free_file(const Attempt& attempt, int rank, int count) {
  int first = 0;
  for (int number = 0; number < first + count; ++number) {
    const std::string name = data_file_name(attempt.id(), rank, number);
    if (attempt.location->stat(name)) first = number + 1;
  }
  return first;
}

// Once the save is published its receipts are removed, and one that is left then counts for nobody:
// that of the manifest counts. No two processes give a data file the same name.
std::optional<Receipt> leave_receipt(const Attempt& attempt, int rank, const AttemptReceipt& left,
                                     Deadline deadline) {
  const Bytes mine = left.encode();
  try {
    const Bytes counts = attempt.meeting->leave(mine, deadline);
    if (counts != mine) return decoded(attempt, rank, counts);
  } catch (const Error&) {
    if (phase_of(attempt) == Phase::kOpen) throw;
  }
  if (!is_published(read_outcome(*attempt.location, attempt.id()))) return std::nullopt;
  auto published = published_receipt_of(attempt, rank);
  const std::vector<ReceiptFile> own = Receipt::decode(left.receipt).files;
  const auto is_own = [&](const ReceiptFile& file) {
    return std::ranges::count(own, file.name, &ReceiptFile::name) > 0;
  };
  const bool is_this = published && (own.empty() ? published->files.empty()
                                                 : std::ranges::any_of(published->files, is_own));
  return is_this ? std::nullopt : std::move(published);
}

std::optional<Receipt> receipt_of(const Attempt& attempt, int rank) {
  const auto bytes = attempt.meeting->message_of(rank);
  return bytes ? std::optional(decoded(attempt, rank, *bytes)) : std::nullopt;
}

std::optional<Receipt> published_receipt_of(const Attempt& attempt, int rank) {
  const std::string name = manifest_name(attempt.id());
  const auto bytes = read_if_there(*attempt.location, name);
  if (!bytes) return std::nullopt;
  Manifest manifest = Manifest::decode(*bytes, name);
  const auto number = static_cast<size_t>(rank);
  if (number >= manifest.receipts.size()) return std::nullopt;
  return std::move(manifest.receipts[number]);
}

}  // namespace tilestone::engine
