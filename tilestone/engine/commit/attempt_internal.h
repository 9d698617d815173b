// A save without a communicator, as one process sees it: plain data, and the steps of the protocol
// that attempt.cc describes. A rank joins and leaves its receipt (attempt.cc); what the ranks hold
// is compared (attempt_contents.cc); whoever finds all receipts publishes (attempt_publish.cc).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/error.h"
#include "tilestone/comm/store_communicator.h"
#include "tilestone/engine/commit/claim_internal.h"
#include "tilestone/engine/open/attempt_files_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/options.h"
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

// ---- Joining, and a rank's receipt

// Begins the attempt, or joins it if it has begun. Returns false if it is already published.
// Errors: kAlreadyExists where the location has another checkpoint, or a save with a communicator
// is under way there; kMismatch where the ranks that joined before have other terms; kRankFailed
// where the attempt was abandoned; what it has failed with.
bool join(const Attempt& attempt, Deadline deadline);

// The first number from which `count` consecutive names of this rank's data files are free. An
// earlier run of a restarted rank may have left files, and not always those with the lowest
// numbers.
int first_free_file(const Attempt& attempt, int rank, int count);

// The receipt of this rank that counts; nullopt if there is none.
std::optional<Receipt> receipt_of(const Attempt& attempt, int rank);
// Once the save is published: the receipt in its manifest; nullopt if that has been removed since.
std::optional<Receipt> published_receipt_of(const Attempt& attempt, int rank);
// Leaves this rank's receipt. Returns another receipt of this rank that exists and counts instead.
// If it throws, the receipt may have been left all the same.
std::optional<Receipt> leave_receipt(const Attempt& attempt, int rank, const AttemptReceipt& left,
                                     Deadline deadline);

// ---- Publishing

// Merges and publishes as far as the existing receipts allow, this rank's group first. Returns true
// once the checkpoint exists. `again`: looks for all files once more that the receipts name: one
// may have been lost since. Errors: kRankFailed where the attempt was abandoned, or what it has
// failed with; kAlreadyExists where another checkpoint was published first; the errors of merging
// receipts that contradict each other. With the latter the attempt has failed.
bool publish_if_complete(const Attempt& attempt, bool again, int threads, Deadline deadline);
// To be called if all ranks have reported. False: their receipts contradict each other or are
// damaged, or a data file is missing. Publishes no index; it may join groups' receipts.
bool can_be_published(const Attempt& attempt, Deadline deadline);
// Waits until the checkpoint exists. Goes on for a publisher that has died. Throws what the attempt
// has failed with; at the deadline, kTimeout that names missing ranks.
void wait_published(const Attempt& attempt, int threads, Deadline deadline);

// ---- How it ends

// Whether its head exists.
bool has_begun(const Attempt& attempt);
// Leaves the error as its outcome, unless there is an outcome. Returns false if it was published
// instead.
bool end_failed(const Attempt& attempt, const Error& error, Deadline deadline);
// Throws what it has failed with, or that it was abandoned.
[[noreturn]] void fail_abandoned(const Attempt& attempt);
// How far it is. kDecided: its outcome is "published". kPublished: its checkpoint stands as a
// whole. Throws what it has failed with, or that the checkpoint is gone since.
enum class Phase : uint8_t { kOpen, kDecided, kPublished };
Phase phase_of(const Attempt& attempt);
// Whether it is published. Then does step 6, if the publisher died before it. Throws as phase_of().
bool is_finished(const Attempt& attempt);
void clean(const Attempt& attempt);  // step 6

// ---- What the ranks hold (attempt_contents.cc)

// What all ranks have left, by rank.
struct AllLeft {
  std::vector<AttemptReceipt> left;  // without AttemptReceipt::receipt
  std::vector<Receipt> receipts;
  std::vector<Bytes> encoded;  // encoded[i] is the result of receipts[i].encode()
};
// Throws if their states contradict each other.
void expect_one_state(const Attempt& attempt, const AllLeft& all);
void expect_declared(const AllLeft& all);

// ---- A rank-local checkpoint becomes an ordinary one (publish_rank_local.cc)

// Whether the location has a rank-local checkpoint. False if there is no checkpoint. Throws the
// errors of opening it.
bool is_rank_local_at(const Location& location);

// Returns the new save id. Reads every item once, unless the ranks' receipts are there.
// `differing`: what to do about an object that differs between ranks. Throws the
// same errors as publish() in unpublished.h.
std::string publish_rank_local(const Location& location, int threads, Deadline deadline,
                               Checks::Differing differing = Checks::Differing::kWarn);

}  // namespace tilestone::engine
