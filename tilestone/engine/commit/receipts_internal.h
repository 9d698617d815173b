// How the ranks of a save meet without a communicator after they have planned with one.
// receipts.cc describes the protocol.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/open/receipt_files_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// One rank's view. Used by one thread at a time.
class BackgroundReceipts {
 public:
  // `storage`: where the ranks write, the location or the directory of a staged save.
  BackgroundReceipts(std::shared_ptr<Storage> storage, std::string save_id, int rank, int ranks);
  ~BackgroundReceipts();  // removes what reserve() has made, if it was not used
  BackgroundReceipts(BackgroundReceipts&&) = default;

  // While the ranks can still communicate: makes the file in which this rank will leave its receipt
  // or the outcome. So a rank that can't write here fails now, and one that finds no room for a
  // file later can still say that it has failed. Until this was called, a missing lock does not
  // mean that the coordinator is gone. Throws what Storage::create throws.
  void reserve();

  // ---- Every rank but the coordinator

  // Leaves what this rank has written (Receipt::encode()).
  void leave(ByteView receipt, Deadline deadline);
  // Whether this rank's receipt is not there. False if that is unknown.
  bool surely_has_none() noexcept;
  // Leaves why this rank has not. Failures are logged, with `error`.
  void leave(const Error& error) noexcept;
  // Waits for the outcome. nullopt: the checkpoint is published. `location`, `format`: where it
  // then is. Removes this rank's receipt, which tells the coordinator that the rank has seen the
  // outcome. Error(kTimeout) at the deadline, kRankFailed if the coordinator is gone.
  struct Failed {
    Error error;
    bool may_exist = false;  // the checkpoint: this rank must not remove its files
  };
  std::optional<Failed> wait_for_outcome(Storage& location,
                                         const std::shared_ptr<const Format>& format,
                                         Deadline deadline);
  // For a rank that has left its error: waits some seconds for the outcome, and removes the
  // receipt.
  void remove_left_error() noexcept;

  // ---- The coordinator

  // Waits for the receipts of all other ranks. Returns the receipts by rank, with `own`. Throws the
  // first error that a rank has left, as soon as it is there. Error(kTimeout) names a rank whose
  // receipt is missing.
  std::vector<Bytes> gather(Bytes own, Deadline deadline);
  // Leaves the outcome. nullopt: published. Failures are logged: then the others find out by
  // themselves, at the latest at their deadline.
  void end(const std::optional<Failed>& failed) noexcept;
  // After end(): waits, at most some seconds, until the others have seen the outcome, and removes
  // what is left. The outcome stays if a rank may still look for it.
  void tidy() noexcept;

 private:
  std::string temporary() const;
  void write(ByteView bytes);
  std::optional<BackgroundReceipt> outcome();
  bool coordinator_is_gone();

  const std::shared_ptr<Storage> storage_;
  const std::string save_id_;
  const int rank_, ranks_;
  std::unique_ptr<WritableFile> reserved_;  // temporary(); null: not there, or used
  bool sees_lock_ = false;                  // the coordinator's, in the call
  std::vector<bool> seen_;                  // coordinator: by rank, its receipt was there
};

}  // namespace tilestone::engine
