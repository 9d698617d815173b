// Random sequences of calls.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/base/sanitized_testing.h"
#include "tilestone/comm/call.h"
#include "tilestone/comm/call_testing.h"
#include "tilestone/comm/comm_testing.h"
#include "tilestone/comm/threads_testing.h"
#include "tilestone/comm/together_testing.h"

namespace tilestone::call_random_test {

using std::chrono::milliseconds;

// In each sequence all ranks make the same calls, except for disturbances: a rank skips a call,
// makes it twice, or makes it at another location. Then the ranks meet by other means than the
// group, and the next call must work.
struct Sequence {
  uint64_t seed;
  int ranks;
  int locations;  // the number of locations that the calls use in turn; 0: one location per call
};

enum class Way { kMake, kSkip, kTwice, kElsewhere, kInterrupted };

Way way_of(const Sequence& sequence, int number, int rank) {
  std::mt19937_64 random(sequence.seed * 1000003 + static_cast<uint64_t>(number) * 101 +
                         static_cast<uint64_t>(rank));
  if (random() % 3 != 0) return Way::kMake;
  constexpr Way kWays[] = {Way::kSkip, Way::kTwice, Way::kElsewhere, Way::kInterrupted};
  return kWays[random() % 4];
}

std::string location_of(int number, int locations) {
  return "location " + std::to_string(locations > 0 ? number % locations : number);
}

bool make_call(const Communicator& comm, const std::string& location, milliseconds patience,
               std::shared_ptr<const Interrupt> interrupt = nullptr) {
  const Deadline deadline = Deadline::after(patience).with_interrupt(std::move(interrupt));
  try {
    Call call(comm, "save", location, deadline);
    try {
      const auto all = all_gather(comm, as_bytes(location), deadline);
      for (const Bytes& other : all) EXPECT_EQ(as_text(other), location);
      return true;
    } catch (...) {
      call.abort(current_error());
      throw;
    }
  } catch (const std::exception&) {
    return false;
  }
}

// Interrupts a call after 0 to 9 ms, as Ctrl-C does.
void make_interrupted_call(const Communicator& comm, const std::string& location, milliseconds wait,
                           milliseconds patience) {
  const auto interrupt = std::make_shared<Interrupt>();
  std::jthread stopper([interrupt, wait] {
    std::this_thread::sleep_for(wait);
    interrupt->request(std::make_exception_ptr(std::runtime_error("Ctrl-C")));
  });
  make_call(comm, location, patience, interrupt);
}

void disturb(const Sequence& sequence, const Communicator& comm, int number) {
  constexpr milliseconds kPatience{60};
  const std::string location = location_of(number, sequence.locations);
  const Way way = way_of(sequence, number, comm.rank());
  if (way == Way::kElsewhere) {
    make_call(comm, "typo " + std::to_string(comm.rank()), kPatience);
  } else if (way == Way::kInterrupted) {
    make_interrupted_call(comm, location, milliseconds((number * 7 + comm.rank() * 3) % 10),
                          kPatience);
  } else if (way != Way::kSkip) {
    make_call(comm, location, kPatience);
    if (way == Way::kTwice) make_call(comm, location, kPatience);
  }
}

// Most notices come at once, some up to 100 ms later: later than the rank waits that sent them.
std::shared_ptr<SlowLink> with_random_delays(const Communicator& comm, uint64_t seed) {
  std::mt19937_64 random(seed * 37 + static_cast<uint64_t>(comm.rank()));
  return std::make_shared<SlowLink>(
      comm, [random]() mutable { return milliseconds(random() % 3 == 0 ? random() % 100 : 0); });
}

void follow(const Sequence& sequence, const Communicator& own, std::barrier<>& meeting) {
  const auto slow = sequence.seed % 2 == 0 ? nullptr : with_random_delays(own, sequence.seed);
  const Communicator comm = slow != nullptr ? Communicator(slow) : own;
  std::mt19937_64 random(sequence.seed * 31 + static_cast<uint64_t>(comm.rank()));
  for (int number = 0; number < 6; ++number) {
    if (random() % 4 == 0) std::this_thread::sleep_for(milliseconds(random() % 5));
    disturb(sequence, comm, number);
    if (random() % 2 == 0) std::this_thread::sleep_for(milliseconds(random() % 5));
    if (number % 3 == 1) continue;      // two disturbances without a good call between them
    if (slow != nullptr) slow->wait();  // no notice is on its way
    meeting.arrive_and_wait();
    const std::string location = number % 2 == 0 ? "after " + std::to_string(number)
                                                 : location_of(number + 1, sequence.locations);
    EXPECT_TRUE(make_call(comm, location, milliseconds(60000)))
        << "seed " << sequence.seed << ", " << sequence.locations << " locations, call " << number
        << ", rank " << comm.rank() << " of " << sequence.ranks;
    meeting.arrive_and_wait();
  }
}

// Runs many groups at once, because they wait most of the time. ASan's tests take the first half of
// the seeds, and TSan's the second.
void for_each_seed(uint64_t seeds, const std::function<void(uint64_t)>& run) {
  constexpr uint64_t kAtOnce = 50;
  std::vector<std::jthread> groups;
  for (uint64_t group = 0; group < kAtOnce; ++group) {
    groups.emplace_back([&, group] {
      const uint64_t first = kThreadSanitized ? seeds / 2 : 0;
      const uint64_t end = kAddressSanitized ? seeds / 2 : seeds;
      for (uint64_t seed = first + group; seed < end && !testing::Test::HasFailure();
           seed += kAtOnce) {
        run(seed);
      }
    });
  }
}

class RandomCalls : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Places, RandomCalls, testing::Values(0, 1, 2, 3),
                         testing::PrintToStringParamName());

TEST_P(RandomCalls, TheNextCallThatAllMakeWorks) {
  for_each_seed(300, [](uint64_t seed) {
    const Sequence sequence{seed, 2 + static_cast<int>(seed % 3), GetParam()};
    std::barrier<> meeting(sequence.ranks);
    run_ranks(sequence.ranks, [&](const Communicator& comm) { follow(sequence, comm, meeting); });
  });
}

// The ranks do not meet between calls and have no deadline. Once they are in different calls, each
// of them fails at once, and the ranks stay one call apart.
TEST(Call, ARankThatSkipsOrRepeatsACallFailsEachFurtherOneOnEveryRankAtOnce) {
  static constexpr int kCalls = 6, kDisturbed = 2;
  for_each_seed(100, [](uint64_t seed) {
    const int ranks = 2 + static_cast<int>(seed % 3);
    const int disturber = static_cast<int>(seed / 3) % ranks;
    const bool skips = seed % 2 == 0;
    run_ranks(ranks, [&](const Communicator& comm) {
      const auto make = [&](int number) {
        return make_call(comm, location_of(number, 0), milliseconds(60000));
      };
      for (int number = 0; number < kCalls; ++number) {
        const bool own = comm.rank() == disturber && number >= kDisturbed;
        const int shifted = !own ? number : skips ? number + 1 : std::max(kDisturbed, number) - 1;
        EXPECT_EQ(make(shifted), number < kDisturbed) << "seed " << seed << ", call " << number;
      }
      EXPECT_TRUE(make(kCalls + 2));
    });
  });
}

}  // namespace tilestone::call_random_test
