// How a rank waits for a save without a communicator. The protocol stands in attempt.cc.
#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/pause_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/terms_internal.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kShortestWait{0.005};  // between two looks of a rank that waits
constexpr Seconds kLongestWait{0.5};
constexpr Seconds kTakeOver{3};   // a publisher is given so long, and more by chance
constexpr Seconds kTakenBack{5};  // for a rank that failed before this one came: it may try again
constexpr int kManyRanks = 4096;  // of more, each looks less often

// By what the pauses of one rank are multiplied, so that all together don't ask the more of a file
// server the more they are.
double crowd(const AttemptHead& head) {
  return std::max(1.0, static_cast<double>(head.world_size) / kManyRanks);
}

// So that not all ranks take over at once.
Seconds by_chance(Seconds most) {
  std::random_device random;
  return most * (static_cast<double>(random()) / static_cast<double>(std::random_device::max()));
}

// nullopt: the file is damaged, and says nothing.
std::optional<int> rank_of_failure(ByteView bytes, const std::string& name) {
  try {
    return LeftFailure::decode(bytes, name).rank;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    return std::nullopt;
  }
}

}  // namespace

// Looks no further than it must: every rank of a large job does this at the same time.
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
      .with_hint(std::string("what the others wrote is kept: ") +
                 (one ? "this rank" : "these ranks") +
                 " can save again under the same token, or gc removes it");
}

// Ranks that report during the look are none of them, nor those that they are merged with then.
std::vector<int> Attempt::missing_of(int group) const {
  const std::string merged = group_name(head_.save_id, group);
  if (location_->stat(merged)) return {};
  std::vector<int> missing;
  for (int rank = head_.group_begin(group); rank < head_.group_end(group); ++rank) {
    if (!location_->stat(report_name(head_, rank))) missing.push_back(rank);
  }
  std::erase_if(missing, [&](int rank) { return location_->stat(report_name(head_, rank)); });
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
        std::string("the other ranks of a save don't hear of this rank's failure: ") +
            failure.what());
  }
}

// Only what was there when this process came: another rank may have left its own meanwhile.
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

// What a rank has left as its failure, if it ends this wait. A save that was decided on is over for
// the others, but where another checkpoint stands in its place.
std::optional<Error> Attempt::heard_of(std::optional<Outcome> outcome, bool is_patient) {
  const std::string name = failed_name(head_.save_id);
  const auto left = read_if_there(*location_, name, kMaxSmallFile);
  if (left != old_failure_) old_failure_.reset();
  if (!left || (old_failure_ && is_patient)) return std::nullopt;
  Error failure = LeftFailure::decode(*left, name).error;
  if (outcome && failure.code() != ErrorCode::kAlreadyExists) return std::nullopt;
  return failure;
}

// Whoever has begun it may have had to take that back (make_head).
void Attempt::expect_begun() const {
  if (location_->stat(attempt_name(head_.save_id)) || has_ended()) return;
  throw Error(ErrorCode::kRankFailed,
              "the save " + head_.save_id + " at " + location_->describe() +
                  " was taken back where it began, or its files were removed")
      .with_file(attempt_name(head_.save_id))
      .with_hint("save again");
}

void Attempt::wait_published(int threads, Deadline deadline) {
  const auto take_over = [&] {
    return Deadline::after(kTakeOver + by_chance(3 * crowd(head_) * kTakeOver));
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
  const Seconds longest = crowd(head_) * kLongestWait;
  for (Seconds wait = kShortestWait;; wait = std::min(1.5 * wait, longest)) {
    const auto outcome = read_outcome(*location_, head_.save_id);
    if (outcome == Outcome::kAbandoned) fail_abandoned();
    if (outcome == Outcome::kPublished && is_published()) return;
    if (head_.rank_local && all_merged()) return;
    const bool is_patient = !for_old_failure.expired() && !deadline.expired();
    if (auto failed = heard_of(outcome, is_patient)) throw *std::move(failed);
    if (deadline.expired()) {
      try {
        expect_begun();
        fail_missing();
      } catch (const Error&) {
        if (is_published()) return;  // just now: what it missed is gone
        throw;
      }
    }
    if (patience.expired()) {
      expect_begun();
      // Any group: all ranks of another one may have died, or left, after their reports.
      const bool tries = !is_being_published();
      if (tries && finish(std::nullopt, threads, deadline)) return;
      patience = take_over();
    }
    pause(std::min(wait, Seconds(deadline.remaining())), deadline);
  }
}

}  // namespace tilestone::engine
