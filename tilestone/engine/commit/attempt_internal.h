// A save without a communicator, as one process sees it: plain data, and the steps of the protocol
// that attempt.cc describes. A rank joins and leaves its receipt (attempt.cc); what the ranks hold
// is compared (attempt_contents.cc); whoever finds all receipts publishes (attempt_publish.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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
std::optional<AttemptReceipt> receipt_of(const Attempt& attempt, int rank);
// Once the save is published: the receipt in its manifest; nullopt if that has been removed since.
std::optional<Receipt> published_receipt_of(const Attempt& attempt, int rank);
// Leaves this rank's receipt. Returns false if another receipt of this rank exists and counts. If
// it throws, the receipt may have been left all the same.
bool leave_receipt(const Attempt& attempt, int rank, const AttemptReceipt& left, Deadline deadline);

// ---- Publishing

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

// ---- How it ends

// Whether its head exists.
bool has_begun(const Attempt& attempt);
// Leaves the error as its outcome, unless there is an outcome. Returns false if it was published
// instead.
bool end_failed(const Attempt& attempt, const Error& error, Deadline deadline);
// Throws what it has failed with, or that it was abandoned.
[[noreturn]] void fail_abandoned(const Attempt& attempt);
// Whether the outcome is "published". Throws if it is "abandoned".
bool outcome_is_published(const Attempt& attempt);
// Whether its checkpoint was published as a whole. Throws if that was so and it is gone.
bool switch_is_published(const Attempt& attempt);
// Whether nothing is left to do. Does step 6 if the publisher died before it. Throws if the attempt
// was abandoned.
bool is_finished(const Attempt& attempt);
void clean(const Attempt& attempt);  // step 6
// Of an attempt that is over: a slow rank may have left files there since it was cleaned.
void remove_directory(const Attempt& attempt);

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

}  // namespace tilestone::engine
