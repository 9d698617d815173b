// A save in the background. Its ranks have planned with a communicator, and the coordinator's
// process has begun the save and holds the location's lock. From now on nobody communicates; the
// ranks meet in small files (StoreCommunicator over MessageFiles):
//
//  1. Each rank writes its data files, syncs them, and leaves its receipt in a gather. A rank that
//     fails leaves its error under one name, whoever is first.
//  2. In a large world the last rank of a group joins the group's receipts, so that the coordinator
//     finds them joined; it joins those itself that are not. The coordinator gathers the receipts,
//     and looks for an error meanwhile and once more when all are there. It carries out the rest of
//     the transaction (commit/transaction.cc). Nobody else ever does.
//  3. The coordinator leaves the outcome before it releases the lock. The others wait for it by its
//     name. A rank that has seen it removes its receipt, and its data files if the save has failed.
//  4. The coordinator waits a second for this, and then removes the outcome. If a rank is late, the
//     outcome stays for it. A later save removes it as a leftover.
//
// A save in a sibling is renamed when it is published: the ranks hold its directory open
// (Storage::held).
//
// The coordinator dies: its lock is released by the system, and a lease lapses. A rank that waits
// finds the location unlocked and no outcome, or its own receipt removed (by a later save, as a
// leftover), twice, a pause between. Of a lease the pause is longer than its period, and the second
// look must find it as the first did: one that is renewed only seems to have lapsed, as in a store
// whose clocks differ. Then it looks for the checkpoint itself: the coordinator may
// have published before it died. Otherwise the save has failed: nobody publishes who has lost a
// lease. Where the storage has neither, or a rank did not see the lock in its call, this takes
// until the deadline.
//
// Another rank dies: no receipt comes. Where claims die with their process, and the world is small
// enough for one more file for each rank, each rank has a claim from the call on until it has seen
// the outcome; in the call it says so, if it also sees the coordinator's lock: then the coordinator
// sees its claim. The coordinator looks now and then whether
// a rank that lacks its receipt has its claim, and fails the save if it finds neither, twice.
// Elsewhere the save fails at the deadline. A rank that lives, but can no longer write, tells the
// others in the session's next save (in_flight_internal.h).
//
// A receipt whose answer is lost is looked for. If it is not there, its rank leaves its error first
// and then removes its data files. If the receipt appears all the same, the coordinator finds the
// error, or that files are missing which the receipt names. If it is unknown whether the receipt is
// there, the rank waits for what the coordinator decides.
//
// A crash at any point leaves what transaction.cc describes. The messages are leftovers: no step of
// a transaction depends on them, and no reader looks at them.
#include "tilestone/engine/save/background_meeting_internal.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/base/pause.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

const std::string kFailedMessage = "failed", kEndedMessage = "ended";
constexpr Seconds kLookForCoordinator{1};  // between two looks for the lock, in small worlds
constexpr Seconds kLookForRanks{2};        // between two looks for the claims of ranks
constexpr double kPeriods = 1.5;           // of a lease, until it counts as lapsed

std::string claim_name(int rank) { return "claim/" + std::to_string(rank); }

}  // namespace

BackgroundMeeting::BackgroundMeeting(std::shared_ptr<Storage> storage, const std::string& save_id,
                                     int rank, int ranks, StoreCommunicator::Tree tree)
    : storage_(storage->held()),
      files_(std::make_shared<MessageFiles>(storage_, save_id, std::to_string(rank))),
      comm_(files_, rank, ranks, tree),
      rank_(rank),
      ranks_(ranks),
      found_(static_cast<size_t>(ranks), false) {}

void BackgroundMeeting::reserve() {
  if (ranks_ == 1) return;
  files_->reserve();
  try {
    sees_lock_ = storage_->is_claimed(std::string(kLockName));
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("the lock of a save can't be seen: ") + error.what());
  }
  const bool is_cheap = !storage_->facts().claims_are_leases() && comm_.names_of_groups().empty();
  if (rank_ == 0 || !sees_lock_ || !is_cheap) return;
  claim_ = std::make_unique<WorkClaim>(storage_, files_->file_of(claim_name(rank_)));
}

std::optional<BackgroundMessage> BackgroundMeeting::read(const std::string& name) {
  const auto bytes = files_->get(name);
  if (!bytes) return std::nullopt;
  return BackgroundMessage::decode(*bytes, files_->file_of(name));
}

void BackgroundMeeting::leave(ByteView receipt, Deadline deadline) {
  if (deadline.expired()) {
    throw Error(ErrorCode::kTimeout, "the deadline passed before this rank could leave its receipt")
        .with_rank(rank_);
  }
  comm_.leave(BackgroundMessage{std::nullopt, Bytes(receipt.begin(), receipt.end())}.encode(),
              deadline);
  // If it fails, the coordinator does it.
  or_log(LogLevel::kDebug, "receipts are not joined", [&] { comm_.join_group(deadline); });
}

bool BackgroundMeeting::surely_has_none() noexcept {
  try {
    return !files_->exist(std::vector{comm_.name_of(rank_)}).front();
  } catch (...) {
    return false;
  }
}

// On a full disk there may be room for an empty file: then the coordinator reads of the failure
// when it has all receipts.
void BackgroundMeeting::leave_failure(const Error& error) noexcept {
  const Deadline never = Deadline::never();
  const std::string own = comm_.name_of(rank_);
  try {
    Error named = error;
    named.with_rank(rank_);
    try {
      decide(*files_, kFailedMessage, BackgroundMessage{named, {}, false, rank_}.encode(), never);
    } catch (const Error&) {
      files_->put_if_absent(own, {}, never);
      files_->put_if_absent(kFailedMessage, {}, never);
      return;
    }
    files_->remove(std::vector{own});
  } catch (const std::exception& failure) {
    log(LogLevel::kWarning,
        "rank " + std::to_string(rank_) +
            " can't leave its failure for the other ranks of the save at " + storage_->describe() +
            ", which wait until their next save or the deadline: " + failure.what() +
            "; its failure: " + error.what());
  }
}

// Twice true only if the lock is the same at both looks.
bool BackgroundMeeting::coordinator_is_gone() {
  const std::string lock(kLockName);
  try {
    if (!sees_lock_ || storage_->is_claimed(lock)) return false;
    const auto found = storage_->stat(lock);
    const std::string tag = found ? found->tag : "";
    const bool is_same = lapsed_.value_or(tag) == tag;
    lapsed_ = is_same ? std::optional(tag) : std::nullopt;
    return is_same;
  } catch (const Error&) {
    return false;  // unknown
  }
}

std::optional<BackgroundMeeting::Failed> BackgroundMeeting::wait_for_outcome(
    Storage& location, const std::shared_ptr<const Format>& format, Deadline deadline) {
  const std::vector<std::string> own{comm_.name_of(rank_)};
  const Seconds between = std::max(kLookForCoordinator, Pauses(ranks_).longest());
  const Seconds until_sure = kPeriods * storage_->facts().lease_period;
  Deadline patience = Deadline::after(between);
  bool was_gone = false;  // before the last look for the outcome
  for (Pauses pauses(ranks_);; pauses.next(deadline)) {
    if (auto found = read(kEndedMessage)) {
      files_->remove(own);
      claim_.reset();
      if (!found->error) return std::nullopt;
      return Failed{*std::move(found->error), found->may_exist};
    }
    const bool is_late = deadline.expired();
    if (!is_late && !patience.expired()) continue;
    // The coordinator releases its lock after it has left the outcome.
    const bool is_gone = coordinator_is_gone() || !files_->exist(own).front();
    if (is_late || (is_gone && was_gone)) {
      if (holds_checkpoint_of(location, format, files_->save_id())) {
        location.settle("");  // the coordinator may have died before it did this
        return std::nullopt;
      }
      throw Error(is_late ? ErrorCode::kTimeout : ErrorCode::kRankFailed,
                  std::string("the coordinator (rank 0) ") +
                      (is_late ? "has left no outcome of the save before the deadline"
                               : "has ended before it published the save"))
          .with_rank(0)
          .with_hint(
              "the checkpoint that was at the location before still stands, unless rank 0 "
              "lives and only can't reach the location");
    }
    was_gone = is_gone;
    patience = Deadline::after(is_gone ? until_sure : between);
  }
}

// ---- The coordinator

void BackgroundMeeting::throw_failure() {
  auto failed = read(kFailedMessage);
  if (!failed) return;
  for (int rank = 0; failed->rank < 0 && rank < ranks_; ++rank) {  // its message is empty
    const auto left = rank == rank_ ? std::nullopt : read(comm_.name_of(rank));
    if (!left || !left->error) continue;
    failed->rank = rank;
    failed->error->with_rank(rank);
  }
  failed_by_ = failed->rank;
  throw failed->error.value_or(Error(ErrorCode::kIo, "a rank has failed"));
}

bool BackgroundMeeting::may_work(int rank) {
  try {
    return storage_->is_claimed(files_->file_of(claim_name(rank)));
  } catch (const Error&) {
    return true;  // unknown
  }
}

void BackgroundMeeting::throw_ended() {
  std::vector<int> ended;
  for (const int rank : comm_.missing(false)) {
    if (!claimed_[static_cast<size_t>(rank)] || may_work(rank)) continue;
    ended.push_back(rank);
    if (std::ranges::find(ended_, rank) == ended_.end()) continue;
    storage_->list(std::string(kTilestoneDirectory) +
                   "/");  // a file server's client then asks anew
    throw_failure();
    throw Error(ErrorCode::kRankFailed,
                "the rank has ended its part before it left its receipt: its process has ended, or "
                "it could not write its error either")
        .with_rank(rank)
        .with_hint("the checkpoint that was at the location before still stands");
  }
  ended_ = std::move(ended);
}

std::vector<Bytes> BackgroundMeeting::gather(Bytes own, Deadline deadline) {
  comm_.keep(BackgroundMessage{std::nullopt, std::move(own)}.encode());
  Deadline patience = Deadline::after(kLookForRanks);
  for (Pauses pauses(1);; pauses.next(deadline)) {
    throw_failure();
    if (comm_.is_complete(deadline)) break;
    if (patience.expired() && !claimed_.empty()) {
      throw_ended();
      patience = Deadline::after(kLookForRanks);
    }
    if (!deadline.expired()) continue;
    const std::vector<int> missing = comm_.missing(false);
    throw Error(ErrorCode::kTimeout, "the rank has left no receipt before the save's deadline")
        .with_rank(missing.empty() ? -1 : missing.front())
        .with_hint(
            "its process has ended or hangs, or can't write here any more, as its log then says; "
            "the checkpoint that was at the location before still stands");
  }
  throw_failure();
  const auto messages = comm_.take();
  if (!messages) throw Error(ErrorCode::kIo, "receipts of the save are gone");
  std::vector<Bytes> receipts;
  for (const Bytes& message : *messages) {
    const auto rank = static_cast<int>(receipts.size());
    auto left = BackgroundMessage::decode(message, files_->file_of(comm_.name_of(rank)));
    if (left.error) throw left.error->with_rank(rank);
    receipts.push_back(std::move(left.receipt));
  }
  return receipts;
}

void BackgroundMeeting::end(const std::optional<Failed>& failed) noexcept {
  if (ranks_ == 1) return;
  try {
    BackgroundMessage left;
    if (failed) left = {failed->error, {}, failed->may_exist};
    decide(*files_, kEndedMessage, left.encode(), Deadline::never());
  } catch (const std::exception& error) {
    log(LogLevel::kWarning,
        std::string("the other ranks of a save can't be notified of its outcome: ") + error.what());
  }
}

bool BackgroundMeeting::has_seen_outcome(int rank) {
  if (rank == rank_ || rank == failed_by_) return true;
  const auto i = static_cast<size_t>(rank);
  const bool is_there = files_->exist(std::vector{comm_.name_of(rank)}).front();
  if (is_there) found_[i] = true;
  return !is_there && (found_[i] || comm_.has(rank));
}

void BackgroundMeeting::tidy(Seconds patience) noexcept {
  if (ranks_ == 1) return;
  try {
    // Until those that look seldom have looked.
    const Deadline deadline = Deadline::after(std::max(patience, 2 * Pauses(ranks_).longest()));
    int next = 0;  // the ranks before it have seen the outcome
    for (Pauses pauses(1);; pauses.next(deadline)) {
      while (next < ranks_ && !deadline.expired() && has_seen_outcome(next)) ++next;
      if (next == ranks_ || deadline.expired()) break;
    }
    std::vector<std::string> unneeded = comm_.names_of_groups();
    unneeded.push_back(kFailedMessage);
    if (next == ranks_) unneeded.push_back(kEndedMessage);
    files_->remove(unneeded);
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, std::string("the outcome of a save stays: ") + error.what());
  }
}

}  // namespace tilestone::engine
