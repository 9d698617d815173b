// A save in the background. Its ranks have planned with a communicator, and the coordinator's
// process has begun the save and holds the location's lock. From now on nobody communicates:
//
//  1. Each rank writes its data files, syncs them, and leaves its receipt under the save id and its
//     number: what it has written, or its error. A receipt appears by a rename, so it is complete.
//     It need not be durable, because after a crash nobody continues the save.
//  2. The coordinator waits for the receipts, by their names, and carries out the rest of the
//     transaction (transaction.cc). Nobody else ever does.
//  3. The coordinator leaves the outcome, another file, before it releases the lock. The others
//     wait for it by its name. A rank that has seen the outcome removes its receipt, and its data
//     files if the save has failed.
//  4. The coordinator waits a few seconds for this, and removes the outcome once all other receipts
//     were there and have been removed. If a rank is late, the outcome stays for it. A later save
//     removes it as a leftover.
//
// A staged save is renamed when it is published: the ranks hold its directory open (Storage::held).
//
// The coordinator dies: its lock is released by the system. A rank that waits finds the location
// unlocked and no outcome, or its own receipt removed (by a later save, as a leftover). Then it
// looks for the checkpoint itself: the coordinator may have published before it died. Otherwise the
// save has failed. Where the storage has no locks, this takes until the deadline.
//
// Another rank dies: no receipt comes, and the save fails at the deadline. A rank that lives, but
// can no longer write, tells the others in the session's next save (save/in_flight_internal.h).
//
// A crash at any point leaves what transaction.cc describes. Receipts and outcomes are leftovers:
// no step of a transaction depends on them, and no reader looks at them.
#include "tilestone/engine/commit/receipts_internal.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/pause_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kShortestLook{0.001};  // between two looks for a file
constexpr Seconds kLongestLook{0.05};
constexpr Seconds kLookForCoordinator{1};  // between two looks for the lock
constexpr Seconds kTidyTime{1};
constexpr int kManyReceipts = 256;  // with more ranks, the coordinator looks less often

std::optional<BackgroundReceipt> read_receipt(Storage& storage, const std::string& name) {
  const auto bytes = read_if_there(storage, name);
  if (!bytes) return std::nullopt;
  return BackgroundReceipt::decode(*bytes, name);
}

// Pauses that become longer.
class Pauses {
 public:
  explicit Pauses(double factor = 1) : longest_(factor * kLongestLook) {}
  void next(const Deadline& deadline) {
    pause(std::min(wait_, Seconds(deadline.remaining())), deadline);
    wait_ = std::min(1.5 * wait_, longest_);
  }

 private:
  const Seconds longest_;
  Seconds wait_ = kShortestLook;
};

}  // namespace

BackgroundReceipts::BackgroundReceipts(std::shared_ptr<Storage> storage, std::string save_id,
                                       int rank, int ranks)
    : storage_(storage->held()),
      save_id_(std::move(save_id)),
      rank_(rank),
      ranks_(ranks),
      seen_(static_cast<size_t>(ranks), false) {}

BackgroundReceipts::~BackgroundReceipts() {
  if (std::exchange(reserved_, nullptr)) remove_files(*storage_, std::vector{temporary()});
}

std::string BackgroundReceipts::temporary() const {
  return temporary_name(save_id_, rank_ == 0 ? "ended" : "receipt-" + std::to_string(rank_));
}

void BackgroundReceipts::reserve() {
  if (ranks_ == 1) return;
  reserved_ = storage_->create(temporary());
  try {
    sees_lock_ = storage_->is_locked(std::string(kLockName));
  } catch (const Error& error) {
    log(LogLevel::kDebug, std::string("the lock of a save can't be seen: ") + error.what());
  }
}

void BackgroundReceipts::write(ByteView bytes) {
  const std::string temp = temporary();
  try {
    auto file = std::exchange(reserved_, nullptr);
    if (file == nullptr) file = storage_->create(temp, bytes.size());
    if (!bytes.empty()) file->append(bytes);
    file->close();
    storage_->rename(temp, rank_ == 0 ? ended_name(save_id_) : receipt_name(save_id_, rank_), true);
  } catch (...) {
    remove_files(*storage_, std::vector{temp});
    throw;
  }
}

void BackgroundReceipts::leave(ByteView receipt, Deadline deadline) {
  if (deadline.expired()) {
    throw Error(ErrorCode::kTimeout, "the deadline passed before this rank could leave its receipt")
        .with_rank(rank_);
  }
  write(BackgroundReceipt{std::nullopt, Bytes(receipt.begin(), receipt.end())}.encode());
}

bool BackgroundReceipts::surely_has_none() noexcept {
  try {
    return !storage_->stat(receipt_name(save_id_, rank_));
  } catch (...) {
    return false;
  }
}

// On a full disk there may be room for an empty file.
void BackgroundReceipts::leave(const Error& error) noexcept {
  try {
    Error named = error;
    const Bytes bytes = BackgroundReceipt{named.with_rank(rank_), {}}.encode();
    try {
      write(bytes);
    } catch (const Error&) {
      write({});
    }
  } catch (const std::exception& failure) {
    log(LogLevel::kWarning, "rank " + std::to_string(rank_) +
                                " can't leave its failure for the other ranks of the save " +
                                save_id_ + ", which wait until their next save or the deadline: " +
                                failure.what() + "; its failure: " + error.what());
  }
}

bool BackgroundReceipts::coordinator_is_gone() {
  try {
    return sees_lock_ && !storage_->is_locked(std::string(kLockName));
  } catch (const Error&) {
    return false;  // unknown
  }
}

// The outcome, if it is there. This rank's receipt, which says that it waits, is then removed.
std::optional<BackgroundReceipt> BackgroundReceipts::outcome() {
  auto found = read_receipt(*storage_, ended_name(save_id_));
  if (found) remove_files(*storage_, std::vector{receipt_name(save_id_, rank_)});
  return found;
}

std::optional<BackgroundReceipts::Failed> BackgroundReceipts::wait_for_outcome(
    Storage& location, const std::shared_ptr<const Format>& format, Deadline deadline) {
  Deadline patience = Deadline::after(kLookForCoordinator);
  bool was_gone = false;  // before the last look for the outcome
  for (Pauses pauses;; pauses.next(deadline)) {
    if (auto found = outcome()) {
      if (!found->error) return std::nullopt;
      return Failed{*std::move(found->error), found->may_exist};
    }
    const bool is_late = deadline.expired();
    if (!is_late && !patience.expired()) continue;
    // The coordinator releases its lock after it has left the outcome.
    const bool is_gone = coordinator_is_gone() || !storage_->stat(receipt_name(save_id_, rank_));
    if (is_late || (is_gone && was_gone)) {
      if (holds_checkpoint_of(location, format, save_id_)) {
        location.sync_directory("");  // the coordinator may have died before it did this
        return std::nullopt;
      }
      throw Error(is_late ? ErrorCode::kTimeout : ErrorCode::kRankFailed,
                  std::string("the coordinator (rank 0) ") +
                      (is_late ? "has left no outcome of the save before the deadline"
                               : "has ended before it published the save"))
          .with_rank(0)
          .with_hint("the checkpoint that was at the location before still stands");
    }
    was_gone = is_gone;
    if (!is_gone) patience = Deadline::after(kLookForCoordinator);
  }
}

void BackgroundReceipts::remove_left_error() noexcept {
  try {
    const Deadline deadline = Deadline::after(kTidyTime);
    for (Pauses pauses; !outcome() && !deadline.expired(); pauses.next(deadline)) {
    }
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, std::string("the receipt of a save stays: ") + error.what());
  }
}

std::vector<Bytes> BackgroundReceipts::gather(Bytes own, Deadline deadline) {
  std::vector<Bytes> receipts(static_cast<size_t>(ranks_));
  receipts[static_cast<size_t>(rank_)] = std::move(own);
  std::vector<int> missing;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_) missing.push_back(rank);
  }
  for (Pauses pauses(std::max(1.0, static_cast<double>(ranks_) / kManyReceipts));;
       pauses.next(deadline)) {
    std::erase_if(missing, [&](int rank) {
      auto receipt = read_receipt(*storage_, receipt_name(save_id_, rank));
      if (!receipt) return false;
      seen_[static_cast<size_t>(rank)] = true;
      if (receipt->error) throw receipt->error->with_rank(rank);
      receipts[static_cast<size_t>(rank)] = std::move(receipt->receipt);
      return true;
    });
    if (missing.empty()) return receipts;
    if (!deadline.expired()) continue;
    throw Error(ErrorCode::kTimeout, "the rank has left no receipt before the save's deadline")
        .with_rank(missing.front())
        .with_hint(
            "its process has ended or hangs, or can't write here any more, as its log then says; "
            "the "
            "checkpoint that was at the location before still stands");
  }
}

void BackgroundReceipts::end(const std::optional<Failed>& failed) noexcept {
  if (ranks_ == 1) return;
  try {
    BackgroundReceipt left;
    if (failed) left = {failed->error, {}, failed->may_exist};
    write(left.encode());
  } catch (const std::exception& error) {
    log(LogLevel::kWarning,
        std::string("the other ranks of a save can't be notified of its outcome: ") + error.what());
  }
}

void BackgroundReceipts::tidy() noexcept {
  if (ranks_ == 1) return;
  try {
    const Deadline deadline = Deadline::after(kTidyTime);
    const auto has_seen = [&](int rank) {
      const bool is_there = storage_->stat(receipt_name(save_id_, rank)).has_value();
      if (is_there) seen_[static_cast<size_t>(rank)] = true;
      return rank == rank_ || (!is_there && seen_[static_cast<size_t>(rank)]);
    };
    int next = 0;  // the ranks before it have seen the outcome
    for (Pauses pauses; !deadline.expired(); pauses.next(deadline)) {
      while (next < ranks_ && has_seen(next)) ++next;
      if (next == ranks_)
        return static_cast<void>(remove_files(*storage_, std::vector{ended_name(save_id_)}));
    }
    log(LogLevel::kDebug, "the outcome of the save " + save_id_ + " stays for a rank that is late");
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, std::string("the outcome of a save stays: ") + error.what());
  }
}

}  // namespace tilestone::engine
