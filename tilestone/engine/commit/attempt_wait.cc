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
#include "tilestone/base/pause.h"
#include "tilestone/engine/commit/attempt_internal.h"
#include "tilestone/engine/commit/attempt_parts_internal.h"
#include "tilestone/engine/commit/work_claim_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/run/terms_internal.h"

namespace tilestone::engine {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kShortestWait{0.005};  // between two looks of a waiting rank
constexpr Seconds kLongestWait{0.5};
constexpr int kMostClaimedLooks = 10;
constexpr Seconds kTakeOver{3};   // wait before looking for a publisher; plus a random time
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

// Looks only at the groups up to the first incomplete one, because every rank of a large job does
// this at the same time.
[[noreturn]] void fail_missing(const Attempt& attempt) {
  const std::vector<int> missing = attempt.meeting->missing(false);
  if (missing.empty()) {
    throw Error(ErrorCode::kTimeout, "the save " + attempt.id() +
                                         " was not published before the deadline, though all ranks "
                                         "have written")
        .with_hint("`tilestone publish` makes it the checkpoint");
  }
  const bool one = missing.size() == 1;
  throw Error(ErrorCode::kTimeout, ranks_text(missing) +
                                       " had not written when the deadline of the save " +
                                       attempt.id() + " passed")
      .with_rank(missing.front())
      .with_hint(std::string("the other ranks' files are kept: ") +
                 (one ? "this rank" : "these ranks") +
                 " can save again under the same token, or `tilestone gc --abandon` ends the save; "
                 "ranks that say this of one another see different directories at one path");
}

// Throws unless the attempt was published just now, so that the files that seem missing were
// removed.
void fail_at_deadline(const Attempt& attempt) {
  try {
    expect_first(attempt);
    fail_missing(attempt);
  } catch (const Error&) {
    if (!switch_is_published(attempt)) throw;
  }
}

}  // namespace

void wait_complete(const Attempt& attempt, bool merged_is_enough, Finish finish, int threads,
                   Deadline deadline) {
  const auto next_takeover = [&] {
    return Deadline::after(kTakeOver + random_time(3 * load_factor(attempt.head) * kTakeOver));
  };
  Deadline patience = next_takeover();
  int claimed_looks = 0;
  const Seconds longest = load_factor(attempt.head) * kLongestWait;
  for (Seconds wait = kShortestWait;; wait = std::min(1.5 * wait, longest)) {
    const auto outcome = read_outcome(*attempt.location, attempt.id());
    if (outcome == Outcome::kAbandoned) fail_abandoned(attempt);
    if (outcome == Outcome::kPublished && switch_is_published(attempt)) return;
    if (merged_is_enough && attempt.meeting->all_joined()) return;
    if (deadline.expired()) return fail_at_deadline(attempt);
    if (patience.expired()) {
      expect_first(attempt);
      // Tries all groups: the ranks of another group may have died, or returned, after they
      // reported.
      // A publisher that is stopped keeps its claim; two do no harm.
      const bool tries = !is_claimed(*attempt.location, publisher_claim(attempt.id())) ||
                         ++claimed_looks > kMostClaimedLooks;
      if (tries && finish(attempt, Look::kAll, threads, deadline)) return;
      patience = next_takeover();
    }
    pause(std::min(wait, Seconds(deadline.remaining())), deadline);
  }
}

void wait_published(const Attempt& attempt, int threads, Deadline deadline) {
  wait_complete(attempt, false, publish_if_complete, threads, deadline);
}

}  // namespace tilestone::engine
