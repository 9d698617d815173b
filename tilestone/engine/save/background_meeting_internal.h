// How the ranks of a save meet without a communicator after they have planned with one.
// background_meeting.cc describes the protocol.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/store_communicator.h"
#include "tilestone/engine/commit/claim_internal.h"
#include "tilestone/engine/open/message_files_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// One rank's view. Used by one thread at a time.
class BackgroundMeeting {
 public:
  // `storage`: where the ranks write, the location or the sibling of a save.
  BackgroundMeeting(std::shared_ptr<Storage> storage, const std::string& save_id, int rank,
                    int ranks, StoreCommunicator::Tree tree = {});

  // While the ranks can still communicate: makes the file of this rank's first message. So a rank
  // that can't write here fails now, and one that finds no room for a file later can still say that
  // it has failed. Until this was called, a missing lock does not mean that the coordinator is
  // gone. Takes this rank's claim. Throws what Storage::create throws.
  void reserve();
  // Whether this rank has a claim that the coordinator can see: it sees the coordinator's lock.
  bool shows_life() const { return sees_lock_ && claim_ != nullptr && claim_->is_held(); }

  // ---- Every rank but the coordinator

  // Leaves what this rank has written (Receipt::encode()). If it throws, it may have been left.
  void leave(ByteView receipt, Deadline deadline);
  // Whether this rank's receipt is not there. False if that is unknown.
  bool surely_has_none() noexcept;
  // Leaves why this rank has not; it then looks for no outcome. Failures are logged, with `error`.
  void leave_failure(const Error& error) noexcept;
  // Waits for the outcome. nullopt: the checkpoint is published. `location`, `format`: where it
  // then is. Error(kTimeout) at the deadline, kRankFailed if the coordinator is gone.
  struct Failed {
    Error error;
    bool may_exist = false;  // the checkpoint: this rank must not remove its files
  };
  std::optional<Failed> wait_for_outcome(Storage& location,
                                         const std::shared_ptr<const Format>& format,
                                         Deadline deadline);

  // ---- The coordinator

  // By rank: shows_life().
  void expect_claims(std::vector<bool> claimed) { claimed_ = std::move(claimed); }
  // Waits for the receipts of all other ranks. Returns the receipts by rank, with `own`. Throws the
  // first error that a rank has left, as soon as it is there. A rank whose receipt is missing is
  // named by Error(kRankFailed) once its process has ended, where that shows, or by kTimeout.
  std::vector<Bytes> gather(Bytes own, Deadline deadline);
  // Leaves the outcome. nullopt: published. Failures are logged: then the others find out by
  // themselves, at the latest at their deadline.
  void end(const std::optional<Failed>& failed) noexcept;
  // After end(): waits, at most some seconds, until the others have seen the outcome, and removes
  // what is left. The outcome stays if a rank may still look for it.
  void tidy(std::chrono::duration<double> patience = std::chrono::seconds(1)) noexcept;

 private:
  std::optional<BackgroundMessage> read(const std::string& name);
  void throw_failure();
  bool may_work(int rank);
  void throw_ended();
  bool coordinator_is_gone();
  bool has_seen_outcome(int rank);

  const std::shared_ptr<Storage> storage_;
  const std::shared_ptr<MessageFiles> files_;
  StoreCommunicator comm_;
  const int rank_, ranks_;
  bool sees_lock_ = false;             // the coordinator's, in the call
  std::optional<std::string> lapsed_;  // the tag of its lock when it was gone at the last look
  std::unique_ptr<WorkClaim> claim_;   // of another rank, until it has seen the outcome
  std::vector<bool> claimed_;          // coordinator: by rank; empty: no rank has a claim
  std::vector<int> ended_;             // coordinator: without receipt and claim at the last look
  int failed_by_ = -1;                 // coordinator: the rank whose error has ended the save
  std::vector<bool> found_;            // coordinator: by rank, tidy() has found its receipt
};

}  // namespace tilestone::engine
