// A save without a communicator, as one process sees it: plain data, and the steps of the protocol
// that attempt.cc describes. Each step has a file: attempt_join.cc, attempt_receipts.cc,
// attempt_merge.cc, attempt_publish.cc, attempt_wait.cc. A save in torch's rank-local mode takes
// the steps at the end of this header instead of those of the same purpose.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/store_communicator.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/format.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct Attempt {
  // `number`: the rank; -1 for a process that leaves no receipt. Does not access the storage.
  Attempt(std::shared_ptr<Storage> location, AttemptHead head, int number = -1);
  const std::string& id() const { return head.save_id; }

  std::shared_ptr<Storage> location;
  AttemptHead head;
  int rank;
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
  std::shared_ptr<StoreCommunicator> meeting;  // in which the ranks leave their receipts
};

// Whether its head exists.
bool has_begun(const Attempt& attempt);

// Leaves the error as its outcome, unless there is an outcome. Returns false if it was published
// instead. A rank-local save's ranks then lose their metadata.
bool end_failed(const Attempt& attempt, const Error& error, Deadline deadline);

// ---- Joining

// Begins the attempt, or joins it if it has begun. Returns false if it is already published.
// Errors: kAlreadyExists where the location has another checkpoint, or a save with a communicator
// is under way there; kMismatch where the ranks that joined before have other terms; kRankFailed
// where the attempt was abandoned; what it has failed with.
bool join(const Attempt& attempt, Deadline deadline);

// ---- A rank's receipt

// The first number from which `count` consecutive names of this rank's data files are free. An
// earlier run of a restarted rank may have left files, and not always those with the lowest
// numbers.
int first_free_file(const Attempt& attempt, int rank, int count);

// The receipt of this rank that counts; nullopt if there is none.
std::optional<AttemptReceipt> receipt_of(const Attempt& attempt, int rank);
// Once the save is published: the receipt in its manifest; nullopt if that has been removed since.
std::optional<Receipt> published_receipt_of(const Attempt& attempt, int rank);
// Publishes this rank's receipt. Returns false if another receipt of this rank exists and counts.
// If it throws, the receipt may have been published all the same.
bool leave_receipt(const Attempt& attempt, int rank, const AttemptReceipt& left, Deadline deadline);

// ---- Merging and publishing

// Merges and publishes as far as the existing receipts allow. Returns true once the checkpoint
// exists. kOwn: looks at the group of this rank first, and at the others only if it is complete.
// kAgain: looks for all files once more that the receipts name: one may have been lost since.
// Errors: kRankFailed where the attempt was abandoned, or what it has failed with; kAlreadyExists
// where another checkpoint was published first; the errors of merging receipts that contradict each
// other. With the latter the attempt has failed.
enum class Look : uint8_t { kOwn, kAll, kAgain };
bool publish_if_complete(const Attempt& attempt, Look look, int threads, Deadline deadline);
// To be called if all ranks have reported. False: their receipts contradict each other or are
// damaged, or a data file is missing. Publishes no index; it may join groups' receipts.
bool can_be_published(const Attempt& attempt, Deadline deadline);

// Waits until the checkpoint exists. Goes on for a publisher that has died. Throws what the attempt
// has failed with; at the deadline, kTimeout that names missing ranks.
void wait_published(const Attempt& attempt, int threads, Deadline deadline);

// ---- Torch's rank-local mode (attempt_rank_local.cc)

// Publishes the metadata of a rank that has reported. Errors: kAlreadyExists where the location has
// an index of another save; kRankFailed where this attempt was abandoned.
void publish_rank_metadata(const Attempt& attempt, int rank, Deadline deadline);
// Publishes no index. Returns true once the metadata of all ranks exists, so that there is a
// rank-local checkpoint.
bool merge_rank_local(const Attempt& attempt, Look look, int threads, Deadline deadline);
// Waits until it exists.
void wait_merged_rank_local(const Attempt& attempt, int threads, Deadline deadline);
// On request: makes an ordinary checkpoint of it.
bool publish_rank_local_if_complete(const Attempt& attempt, Look look, int threads,
                                    Deadline deadline);
// Once the attempt has failed: removes the metadata of its ranks.
void withdraw_rank_metadata(const Attempt& attempt);

}  // namespace tilestone::engine
