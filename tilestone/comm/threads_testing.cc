#include "tilestone/comm/threads_testing.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "tilestone/comm/call_port.h"
#include "tilestone/comm/operation_internal.h"

namespace tilestone {
namespace {

using comm_internal::check_parts;

// Holds the ranks' messages. A message is identified by its source and the number of its operation.
// A late message, for an operation that the receiver has given up, has an old number and is
// dropped.
class Hub {
 public:
  explicit Hub(int size) : boxes_(static_cast<size_t>(size)) {}

  int size() const { return static_cast<int>(boxes_.size()); }

  // From now on drops messages to `rank` of operations before `operation`.
  void begin(int rank, uint64_t operation);

  // Returns false, and sends nothing, if rank `to` is gone.
  bool send(int from, int to, uint64_t operation, Bytes message);

  // Waits for one message from each of `sources`, which must not include `rank`. Returns them in
  // the order of `sources`. `call` is the number of the call that the operation belongs to, or 0.
  std::vector<Bytes> receive(int rank, const std::vector<int>& sources, uint64_t operation,
                             uint64_t call, std::string_view name, Deadline deadline);

  void post(int from, std::vector<Notice> notices);
  std::vector<Notice> newest(int rank, Deadline deadline);
  // Makes the operations of the call that can't be completed throw `why` on all ranks.
  void abort(uint64_t call, const Error& why);
  // If the call was aborted, throws the error.
  void check(uint64_t call);

  // Marks a rank as gone. `why` is the error that ended it, or "". Only the first call counts.
  void leave(int rank, std::string why);

  // The error that ended the rank, or "".
  std::string why(int rank);

 private:
  struct Mailbox {
    std::condition_variable changed;
    std::map<std::pair<uint64_t, int>, Bytes> messages;  // by operation and source
    std::map<int, Bytes> notices;                        // by source
    uint64_t current = 0;                                // number of the current operation
    bool gone = false;
    std::string why;
  };

  Mailbox& box(int rank) { return boxes_[static_cast<size_t>(rank)]; }
  std::vector<Notice> take_notices(int rank);
  void wake_all();

  std::mutex mutex_;
  std::vector<Mailbox> boxes_;
  std::map<uint64_t, Error> aborted_;  // by call number
};

void Hub::begin(int rank, uint64_t operation) {
  std::lock_guard lock(mutex_);
  Mailbox& mine = box(rank);
  mine.current = operation;
  mine.messages.erase(mine.messages.begin(), mine.messages.lower_bound({operation, 0}));
}

bool Hub::send(int from, int to, uint64_t operation, Bytes message) {
  std::lock_guard lock(mutex_);
  Mailbox& target = box(to);
  if (target.gone) return false;
  if (operation < target.current) return true;
  target.messages.emplace(std::pair(operation, from), std::move(message));
  target.changed.notify_one();
  return true;
}

std::vector<Bytes> Hub::receive(int rank, const std::vector<int>& sources, uint64_t operation,
                                uint64_t call, std::string_view name, Deadline deadline) {
  std::unique_lock lock(mutex_);
  Mailbox& mine = box(rank);
  while (true) {
    std::vector<int> missing, gone;
    for (int source : sources) {
      if (mine.messages.contains({operation, source})) continue;
      missing.push_back(source);
      if (box(source).gone) gone.push_back(source);
    }
    if (missing.empty()) break;
    if (const auto why = aborted_.find(call); why != aborted_.end()) throw Error(why->second);
    if (!gone.empty()) throw comm_internal::rank_failed(name, gone, box(gone.front()).why);
    if (deadline.expired()) throw comm_internal::timed_out(name, missing);
    mine.changed.wait_for(lock, deadline.wait_time());
  }
  std::vector<Bytes> received;
  received.reserve(sources.size());
  for (int source : sources) {
    received.push_back(std::move(mine.messages.extract({operation, source}).mapped()));
  }
  return received;
}

void Hub::leave(int rank, std::string why) {
  std::lock_guard lock(mutex_);
  if (box(rank).gone) return;
  box(rank).gone = true;
  box(rank).why = std::move(why);
  box(rank).messages.clear();
  wake_all();
}

void Hub::wake_all() {
  for (Mailbox& each : boxes_) each.changed.notify_all();
}

void Hub::post(int from, std::vector<Notice> notices) {
  std::lock_guard lock(mutex_);
  for (Notice& notice : notices) {
    Mailbox& target = box(notice.rank);
    if (target.gone) continue;
    target.notices.insert_or_assign(from, std::move(notice.bytes));
    target.changed.notify_one();
  }
}

std::vector<Notice> Hub::newest(int rank, Deadline deadline) {
  std::unique_lock lock(mutex_);
  while (true) {
    std::vector<Notice> notices = take_notices(rank);
    if (!notices.empty() || deadline.expired()) return notices;
    box(rank).changed.wait_for(lock, deadline.wait_time());
  }
}

// The notices that a rank is gone come last, after what it sent before. Rank 0 gets them about all
// ranks, the others only about rank 0.
std::vector<Notice> Hub::take_notices(int rank) {
  std::vector<Notice> notices;
  for (auto& [from, bytes] : std::exchange(box(rank).notices, {})) {
    notices.push_back({from, std::move(bytes), {}});
  }
  const int others = rank == 0 ? size() : 1;
  for (int other = 0; other < others; ++other) {
    if (other == rank || !box(other).gone) continue;
    notices.push_back({other, {}, box(other).why});
  }
  return notices;
}

void Hub::abort(uint64_t call, const Error& why) {
  constexpr size_t kMaxKept = 16;
  std::lock_guard lock(mutex_);
  // The other ranks get a decoded copy without the cause, as they would in another process.
  aborted_.emplace(call, Error::decode(why.encode()));
  if (aborted_.size() > kMaxKept) aborted_.erase(aborted_.begin());
  wake_all();
}

void Hub::check(uint64_t call) {
  std::lock_guard lock(mutex_);
  if (const auto why = aborted_.find(call); why != aborted_.end()) throw Error(why->second);
}

std::string Hub::why(int rank) {
  std::lock_guard lock(mutex_);
  return box(rank).why;
}

// One rank's end. The rank counts as gone when the last Communicator that shares it is destroyed.
class ThreadsEnd final : public CommunicatorImpl, private CallPort {
 public:
  ThreadsEnd(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {
    for (int other = 0; other < size(); ++other) {
      if (other != rank_) others_.push_back(other);
    }
  }
  ~ThreadsEnd() override { leave(""); }

  void leave(std::string why) { hub_->leave(rank_, std::move(why)); }

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  std::string describe() const override { return "threads"; }

  std::vector<Bytes> gather(ByteView mine, Deadline deadline) override {
    begin();
    if (rank_ != 0) {
      send_all("gather", {0}, [&](int) { return Bytes(mine.begin(), mine.end()); });
      return {};
    }
    return with_own(Bytes(mine.begin(), mine.end()), receive("gather", others_, deadline));
  }

  Bytes scatter(std::vector<Bytes> parts, Deadline deadline) override {
    begin();
    if (rank_ == 0) check_parts("scatter", parts.size(), size());
    if (rank_ != 0) return std::move(receive("scatter", {0}, deadline).front());
    send_all("scatter", others_, [&](int to) { return std::move(parts[to]); });
    return std::move(parts[rank_]);
  }

  Bytes broadcast(ByteView mine, Deadline deadline) override {
    begin();
    if (rank_ != 0) return std::move(receive("broadcast", {0}, deadline).front());
    send_all("broadcast", others_, [&](int) { return Bytes(mine.begin(), mine.end()); });
    return Bytes(mine.begin(), mine.end());
  }

  std::vector<Bytes> all_to_all(std::vector<Bytes> to, Deadline deadline) override {
    begin();
    check_parts("all_to_all", to.size(), size());
    send_all("all_to_all", others_, [&](int rank) { return std::move(to[rank]); });
    return with_own(std::move(to[rank_]), receive("all_to_all", others_, deadline));
  }

  CallPort* call_port() override { return this; }

 private:
  void post(std::vector<Notice> notices, Deadline) override {
    hub_->post(rank_, std::move(notices));
  }
  std::vector<Notice> newest(Deadline deadline, Deadline) override {
    return hub_->newest(rank_, deadline);
  }
  uint64_t last_operation() const override { return operation_; }
  void enter(uint64_t first) override { operation_ = call_ = first; }
  void abort(const Error& why) override {
    if (call_ != 0) hub_->abort(call_, why);
  }
  void leave() override { call_ = 0; }
  CallMemory& memory() override { return memory_; }

  // Called first in each operation: an operation with bad arguments counts too, as on other ranks.
  void begin() { hub_->begin(rank_, ++operation_); }

  // Sends to every target, even if another target is gone.
  template <typename MessageFor>
  void send_all(std::string_view name, const std::vector<int>& targets, MessageFor message_for) {
    std::vector<int> gone;
    for (int to : targets) {
      if (!hub_->send(rank_, to, operation_, message_for(to))) gone.push_back(to);
    }
    if (gone.empty()) return;
    hub_->check(call_);  // a rank that aborts the call does so before it is gone
    throw comm_internal::rank_failed(name, gone, hub_->why(gone.front()));
  }

  std::vector<Bytes> receive(std::string_view name, const std::vector<int>& sources,
                             Deadline deadline) {
    return hub_->receive(rank_, sources, operation_, call_, name, deadline);
  }

  std::vector<Bytes> with_own(Bytes own, std::vector<Bytes> from_others) {
    from_others.insert(from_others.begin() + rank_, std::move(own));
    return from_others;
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
  std::vector<int> others_;
  uint64_t operation_ = 0;
  uint64_t call_ = 0;  // number of the current call; 0 outside of calls
  CallMemory memory_;
};

std::vector<std::shared_ptr<ThreadsEnd>> make_ends(int n) {
  if (n < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "threads: a group needs at least one rank, found " + std::to_string(n));
  }
  if (n > kMaxThreadRanks) {
    throw Error(ErrorCode::kInvalidArgument, "threads: a group of threads has at most " +
                                                 std::to_string(kMaxThreadRanks) + " ranks, not " +
                                                 std::to_string(n));
  }
  auto hub = std::make_shared<Hub>(n);
  std::vector<std::shared_ptr<ThreadsEnd>> ends;
  for (int rank = 0; rank < n; ++rank) ends.push_back(std::make_shared<ThreadsEnd>(hub, rank));
  return ends;
}

// How a rank ended.
struct Ending {
  std::exception_ptr thrown;  // null: nothing was thrown
  int order = 0;              // position in time among the ranks that threw, from 0
  int blamed = -1;            // the rank that the error names
};

void run_rank(const std::shared_ptr<ThreadsEnd>& end, const std::function<void(Communicator)>& body,
              std::atomic<int>& thrown, Ending& ending) {
  try {
    body(Communicator(end));
  } catch (...) {
    // The order must be fixed before the other ranks learn that this one has failed.
    const Error error = current_error();
    ending = {std::current_exception(), thrown++, error.rank()};
    end->leave(error.what());
  }
}

std::vector<Ending> run_all(int n, const std::function<void(Communicator)>& body) {
  // If a thread can't be started, `ends` is destroyed before `running`. The ranks that never began
  // then count as gone, so the ranks that wait for them end and can be joined.
  std::vector<Ending> endings(static_cast<size_t>(n < 1 || n > kMaxThreadRanks ? 0 : n));
  std::atomic<int> thrown{0};
  std::vector<std::jthread> running;
  std::vector<std::shared_ptr<ThreadsEnd>> ends = make_ends(n);
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    running.emplace_back(
        [end = std::move(ends[rank]), &body, &thrown, &ending = endings[rank]]() mutable {
          run_rank(std::exchange(end, nullptr), body, thrown, ending);
        });
  }
  ends.clear();
  running.clear();  // joins
  return endings;
}

// The error that caused the others; null if no rank threw.
std::exception_ptr original_of(const std::vector<Ending>& endings) {
  const Ending* first = nullptr;  // the first error in time
  const Ending* own = nullptr;    // the first error that names the rank that threw it
  for (size_t rank = 0; rank < endings.size(); ++rank) {
    const Ending& ending = endings[rank];
    if (!ending.thrown) continue;
    if (first == nullptr || ending.order < first->order) first = &ending;
    if (ending.blamed != static_cast<int>(rank)) continue;
    if (own == nullptr || ending.order < own->order) own = &ending;
  }
  if (own != nullptr) return own->thrown;
  const Ending* found = first;
  for (size_t steps = 0; found != nullptr; ++steps) {
    if (steps == endings.size()) return first->thrown;  // the ranks blame one another in a circle
    if (found->blamed < 0 || found->blamed >= static_cast<int>(endings.size())) break;
    const Ending& blamed = endings[static_cast<size_t>(found->blamed)];
    if (!blamed.thrown) break;
    found = &blamed;
  }
  return found != nullptr ? found->thrown : nullptr;
}

}  // namespace

std::vector<Communicator> threads(int n) {
  std::vector<Communicator> group;
  for (auto& end : make_ends(n)) group.emplace_back(std::move(end));
  return group;
}

void run_ranks(int n, const std::function<void(Communicator)>& body) {
  if (const std::exception_ptr original = original_of(run_all(n, body))) {
    std::rethrow_exception(original);
  }
}

std::vector<std::exception_ptr> run_ranks_collect(int n,
                                                  const std::function<void(Communicator)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(std::max(n, 0)));
  try {
    run_ranks(n, [&](Communicator comm) {
      const auto rank = static_cast<size_t>(comm.rank());
      try {
        body(std::move(comm));
      } catch (...) {
        errors[rank] = std::current_exception();
        throw;
      }
    });
  } catch (...) {
    // If no rank threw, the group could not be made.
    if (std::all_of(errors.begin(), errors.end(), [](const auto& e) { return !e; })) throw;
  }
  return errors;
}

}  // namespace tilestone
