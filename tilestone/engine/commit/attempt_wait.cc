// How a rank waits for a save without a communicator. attempt.cc describes the protocol.
#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/pause_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/terms_internal.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kShortestWait{0.005};  // between two looks of a waiting rank
constexpr Seconds kLongestWait{0.5};
constexpr Seconds kTakeOver{3};   // wait before taking over from a publisher; plus a random time
constexpr Seconds kTakenBack{5};  // how long an old failure is ignored: its rank may try again
constexpr int kManyRanks = 4096;  // in a larger world each rank looks less often

// The factor for the pauses of one rank. It limits the load that all ranks together put on a file
// server.
double load_factor(const AttemptHead& head) {
  return std::max(1.0, static_cast<double>(head.world_size) / kManyRanks);
}

// A random time up to `most`, so that not all ranks take over at once.
Seconds random_time(Seconds most) {
  std::random_device random;
  return most * (static_cast<double>(random()) / static_cast<double>(std::random_device::max()));
}

// nullopt: the file is damaged.
std::optional<int> rank_of_failure(ByteView bytes, const std::string& name) {
  try {
    return LeftFailure::decode(bytes, name).rank;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    return std::nullopt;
  }
}

}  // namespace

// Looks only at the groups up to the first incomplete one, because every rank of a large job does
// this at the same time.
void Attempt::fail_missing() const {
  std::vector<int> missing;
  for (int group = 0; group < head_.group_count() && missing.empty(); ++group) {
    missing = missing_of(group);
  }
  if (missing.empty()) {
    throw Error(ErrorCode::kTimeout, "the save " + head_.save_id +
                                         " was not published before the deadline, though all ranks "
                                         "have written")
        .with_hint("`tilestone publish` makes it the checkpoint");
  }
  const bool one = missing.size() == 1;
  throw Error(ErrorCode::kTimeout, ranks_text(missing) +
                                       " had not written when the deadline of the save " +
                                       head_.save_id + " passed")
      .with_rank(missing.front())
      .with_hint(std::string("the other ranks' files are kept: ") +
                 (one ? "this rank" : "these ranks") +
                 " can save again under the same token, or `tilestone gc --abandon` ends the save");
}

// Does not return ranks that report, or whose group is merged, during the call.
std::vector<int> Attempt::missing_of(int group) const {
  const std::string merged = group_name(head_.save_id, group);
  if (location_->stat(merged)) return {};
  std::vector<int> missing;
  for (int rank = head_.group_begin(group); rank < head_.group_end(group); ++rank) {
    if (!location_->stat(attempt_receipt_name(head_, rank))) missing.push_back(rank);
  }
  std::erase_if(missing,
                [&](int rank) { return location_->stat(attempt_receipt_name(head_, rank)); });
  if (!missing.empty() && location_->stat(merged)) missing.clear();
  return missing;
}

void Attempt::leave_failure(int rank, const Error& error, Deadline deadline) noexcept {
  try {
    LeftFailure left{rank, error};
    left.error.with_rank(rank);
    location_->publish(failed_name(head_.save_id),
                       attempt_temporary(head_.save_id, "failed-" + std::to_string(rank)),
                       left.encode(), false, deadline);
  } catch (const Error& failure) {
    if (failure.code() == ErrorCode::kAlreadyExists) return;
    log(LogLevel::kWarning,
        std::string("the other ranks of a save can't be notified of this rank's failure: ") +
            failure.what());
  }
}

// Removes only a failure that was there when this process joined: another rank may have left its
// own since then.
void Attempt::take_back_failure(int rank) {
  if (!old_failure_) return;
  const std::string name = failed_name(head_.save_id);
  const auto left_by = rank_of_failure(*old_failure_, name);
  const bool is_outside = !left_by || *left_by < 0 || *left_by >= head_.world_size;
  if (left_by != rank && !is_outside) return;
  if (read_if_there(*location_, name, kMaxSmallFile) != old_failure_) return;
  remove_files(*location_, std::vector{name});
  old_failure_.reset();
}

// The failure that a rank has left, if it ends this wait. Once there is an outcome, a failure does
// not end it, except kAlreadyExists: then another checkpoint was published first.
std::optional<Error> Attempt::failure_to_throw(std::optional<Outcome> outcome, bool is_patient) {
  const std::string name = failed_name(head_.save_id);
  const auto left = read_if_there(*location_, name, kMaxSmallFile);
  if (left != old_failure_) old_failure_.reset();
  if (!left || (old_failure_ && is_patient)) return std::nullopt;
  Error failure = LeftFailure::decode(*left, name).error;
  if (outcome && failure.code() != ErrorCode::kAlreadyExists) return std::nullopt;
  return failure;
}

// The rank that began the attempt may have removed its head again (make_head).
void Attempt::expect_begun() const {
  if (location_->stat(attempt_name(head_.save_id)) || has_ended()) return;
  throw Error(ErrorCode::kRankFailed,
              "the save " + head_.save_id + " at " + location_->describe() +
                  " was withdrawn by the rank that began it, or its files were removed")
      .with_file(attempt_name(head_.save_id))
      .with_hint("save again");
}

void Attempt::wait_published(int threads, Deadline deadline) {
  const auto take_over = [&] {
    return Deadline::after(kTakeOver + random_time(3 * load_factor(head_) * kTakeOver));
  };
  Deadline patience = take_over();
  const Deadline for_old_failure = Deadline::after(kTakenBack);
  std::optional<Bytes> lease;  // as last seen
  const auto is_being_published = [&] {
    auto now = read_if_there(*location_, publisher_name(head_.save_id), kMaxSmallFile);
    const bool lives = now && now != lease;
    lease = std::move(now);
    return lives;
  };
  const Seconds longest = load_factor(head_) * kLongestWait;
  for (Seconds wait = kShortestWait;; wait = std::min(1.5 * wait, longest)) {
    const auto outcome = read_outcome(*location_, head_.save_id);
    if (outcome == Outcome::kAbandoned) fail_abandoned();
    if (outcome == Outcome::kPublished && is_published()) return;
    if (head_.rank_local && all_merged()) return;
    const bool is_patient = !for_old_failure.expired() && !deadline.expired();
    if (auto failed = failure_to_throw(outcome, is_patient)) throw *std::move(failed);
    if (deadline.expired()) {
      try {
        expect_begun();
        expect_first();
        fail_missing();
      } catch (const Error&) {
        if (is_published()) return;  // just now, so the files that seemed missing were removed
        throw;
      }
    }
    if (patience.expired()) {
      expect_begun();
      expect_first();
      // Tries all groups: the ranks of another group may have died, or returned, after they
      // reported.
      const bool tries = !is_being_published();
      if (tries && finish(std::nullopt, threads, deadline)) return;
      patience = take_over();
    }
    pause(std::min(wait, Seconds(deadline.remaining())), deadline);
  }
}

}  // namespace tilestone::engine
