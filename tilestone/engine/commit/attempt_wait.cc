// How a rank waits for a save without a communicator. The protocol stands in attempt.cc.
#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/run/terms_internal.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kFirstPause{0.005};  // between two looks of a rank that waits
constexpr Seconds kLongestPause{0.5};
constexpr Seconds kTakeOver{3};   // a publisher is given so long, and more by chance
constexpr int kManyRanks = 4096;  // of more, each looks less often

void pause(Seconds time, Deadline deadline) {
  const Deadline end = Deadline::after(time);
  while (!end.expired() && !deadline.expired()) {
    std::this_thread::sleep_for(std::min(end.remaining(), deadline.wait_time()));
  }
}

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

}  // namespace

// Looks no further than it must: every rank of a large job does this at the same time.
void Attempt::fail_missing() const {
  std::vector<int> missing;
  for (int group = 0; group < head_.group_count() && missing.empty(); ++group) {
    if (location_->stat(group_name(head_.save_id, group))) continue;
    for (int rank = head_.group_begin(group); rank < head_.group_end(group); ++rank) {
      if (!location_->stat(report_name(head_, rank))) missing.push_back(rank);
    }
  }
  if (missing.empty()) {
    throw Error(ErrorCode::kTimeout, "the save " + head_.save_id +
                                         " was not published before the deadline, though all ranks "
                                         "have written");
  }
  throw Error(ErrorCode::kTimeout, ranks_text(missing) +
                                       " had not written when the deadline of the save " +
                                       head_.save_id + " passed")
      .with_rank(missing.front())
      .with_hint(
          "what the others wrote is kept: these ranks can save again under the same token, or "
          "gc removes it");
}

void Attempt::wait_published(int rank, int threads, Deadline deadline) {
  const auto take_over = [&] {
    return Deadline::after(kTakeOver + by_chance(3 * crowd(head_) * kTakeOver));
  };
  Deadline patience = take_over();
  std::optional<Bytes> lease;  // as last seen
  const auto is_being_published = [&] {
    auto now = read_if_there(*location_, publisher_name(head_.save_id));
    const bool lives = now && now != lease;
    lease = std::move(now);
    return lives;
  };
  const Seconds longest = crowd(head_) * kLongestPause;
  for (Seconds wait = kFirstPause;; wait = std::min(1.5 * wait, longest)) {
    const auto outcome = read_outcome(*location_, head_.save_id);
    if (outcome == Outcome::kAbandoned) fail_abandoned();
    if (outcome == Outcome::kPublished && is_published()) return;
    if (head_.rank_local && all_merged()) return;
    if (const auto failed = read_failed(*location_, head_.save_id); failed && !outcome) {
      throw *failed;
    }
    if (deadline.expired()) {
      try {
        fail_missing();
      } catch (const Error&) {
        if (is_published()) return;  // just now: what it missed is gone
        throw;
      }
    }
    if (patience.expired()) {
      const bool tries = !is_being_published();
      if (tries && finish(head_.group_of(rank), threads, deadline)) return;
      patience = take_over();
    }
    pause(std::min(wait, Seconds(deadline.remaining())), deadline);
  }
}

}  // namespace tilestone::engine
