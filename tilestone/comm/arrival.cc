#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/comm/operation_internal.h"
#include "tilestone/comm/rendezvous_internal.h"

namespace tilestone::comm_internal {
namespace {

class Member {
 public:
  Member(CallPort& port, int rank, const Hello& hello, Deadline deadline)
      : port_(port),
        rank_(rank),
        hello_(hello),
        deadline_(deadline),
        waiting_(port.memory().waiting),
        grace_(port.memory().grace) {}

  // Waits for all ranks. Returns the call's number.
  uint64_t arrive() {
    try {
      say({NoticeOf::kHello, hello_.nonce, 0, hello_}, deadline_);
      while (true) {
        const Deadline until = grace_.next_wait(coordinator_left(), deadline_);
        if (const std::optional<uint64_t> number = answer(until)) return *number;
        const bool late = deadline_.expired();
        if (coordinator_left() && (late || grace_.over())) {
          throw not_back(hello_, waiting_.at(0), 0);
        }
        if (late) throw timed_out(hello_.name(), {0});
      }
    } catch (...) {
      if (!answered_) withdraw();
      throw;
    }
  }

 private:
  // The call's number, or nullopt if there is no answer yet. If the coordinator refused, throws its
  // error.
  std::optional<uint64_t> answer(Deadline deadline) {
    for (const Notice& notice : port_.newest(deadline, limit_)) {
      if (notice.lost) throw rank_failed(hello_.name(), {0}, *notice.lost);
      const CallNotice answer = CallNotice::from(notice);
      const bool mine = answer.nonce == hello_.nonce;
      waiting_.erase(0);
      if (answer.kind == NoticeOf::kWithdrawal) {
        waiting_.insert_or_assign(0, *answer.hello);
        answered_ = answered_ || mine;
        if (mine) throw Error(*answer.hello->left);
      }
      if (!mine && answer.kind == NoticeOf::kGo) end(answer.number);
      if (!mine || answer.kind == NoticeOf::kHere) continue;
      answered_ = true;
      if (answer.kind == NoticeOf::kRefusal) throw Error(*answer.error);
      return answer.number;
    }
    return std::nullopt;
  }

  // Ends a call that has begun with a hello of this rank whose withdrawal came too late.
  void end(uint64_t number) {
    port_.enter(number);
    abort_call(port_, Error(ErrorCode::kRankFailed,
                            "rank " + std::to_string(rank_) + " had left the call, which came late")
                          .with_rank(rank_)
                          .with_hint("repeat the call on every rank"));
    port_.leave();
  }

  void say(const CallNotice& notice, const Deadline& deadline) {
    port_.post({notice.to(0)}, deadline);
  }

  bool coordinator_left() const {
    const auto found = waiting_.find(0);
    return found != waiting_.end() && same_call(found->second, hello_);
  }

  // Withdraws the hello. The coordinator may have begun the call before it gets the withdrawal;
  // then the call is aborted.
  void withdraw() {
    const Error why = current_error().with_rank(rank_);
    try {
      limit_ = farewell_deadline();
      say({NoticeOf::kWithdrawal, hello_.nonce, 0, hello_, why}, limit_);
      const std::optional<uint64_t> number = answer(Deadline::after(std::chrono::seconds(0)));
      if (!number) return;
      port_.enter(*number);
      port_.abort(why);
      port_.leave();
    } catch (...) {
      log(LogLevel::kDebug,
          hello_.name() + ": could not withdraw from the call: " + current_error().what());
    }
    port_.missed({0});
  }

  CallPort& port_;
  const int rank_;
  const Hello& hello_;
  const Deadline deadline_;
  Deadline limit_ = deadline_;  // passed to CallPort::newest
  std::map<int, Hello>& waiting_;
  Grace grace_;
  bool answered_ = false;
};

// The coordinator's share of the remaining time. The rest is for answering the others.
constexpr double kCoordinatorShare = 0.9;
// Contradicting hellos must persist this long before they fail the call: a rank may be about to
// withdraw.
constexpr std::chrono::milliseconds kMismatchTime{50};

// A rank that left because its deadline passed counts as late, not as gone.
bool left_for_good(const Hello& hello) {
  return hello.left && hello.left->code() != ErrorCode::kTimeout;
}

Error nobody_came(const Hello& own, const std::vector<int>& missing) {
  const std::string who = ranks_text(missing, kNamedRanks);
  return Error(ErrorCode::kTimeout, own.name() + ": the deadline passed while waiting for " + who +
                                        (missing.size() == 1 ? ", which is" : ", which are") +
                                        " in no save or load on this group")
      .with_rank(missing.front())
      .with_hint("check that all ranks pass the same group; if they do, check what " + who +
                 " did meanwhile, or use a longer timeout");
}

class Coordinator {
 public:
  Coordinator(CallPort& port, int size, const Hello& own, Deadline deadline)
      : port_(port),
        size_(static_cast<size_t>(size)),
        own_(own),
        deadline_(deadline),
        memory_(port.memory()),
        waiting_(memory_.waiting),
        grace_(memory_.grace) {}

  // Waits for all ranks. Returns the call's number.
  uint64_t arrive() {
    std::erase_if(waiting_, [this](const auto& entry) {
      const Hello& hello = entry.second;
      return hello.left && !(left_for_good(hello) && same_call(hello, own_));
    });
    for (auto& [rank, hello] : waiting_) hello.may_return = hello.left.has_value();
    waiting_.insert_or_assign(0, own_);
    try {
      return wait_for_all();
    } catch (...) {
      if (waiting_.contains(0)) leave(current_error());
      throw;
    }
  }

 private:
  uint64_t wait_for_all() {
    receive(Deadline::after(std::chrono::seconds(0)), true);
    while (true) {
      const Fate fate = decide(present());
      if (fate == Fate::kGo) return begin();
      if (fate == Fate::kLeft) fail_with_who_left();
      const bool away = fate == Fate::kAway;
      const Deadline until = grace_.next_wait(away, deadline_);
      if (fate == Fate::kMismatch) {
        if (!receive(Deadline::after(kMismatchTime), false)) fail_all(mismatch());
        continue;
      }
      const bool late = deadline_.expired();
      if (receive(until, false)) continue;
      if (away && (late || grace_.over())) fail_with_who_is_away();
      if (late) fail_all(too_late());
    }
  }

  // Receives notices until the deadline; returns false if there were none. `first`: the notices
  // arrived before this call began.
  bool receive(Deadline deadline, bool first) {
    std::vector<int> lost;
    std::string why;
    const std::vector<Notice> notices = port_.newest(deadline, deadline_);
    for (const Notice& notice : notices) {
      if (notice.lost) {
        lost.push_back(notice.rank);
        why = *notice.lost;
        continue;
      }
      CallNotice said = CallNotice::from(notice);
      if (said.kind == NoticeOf::kHello) {
        on_hello(notice.rank, std::move(said));
      } else if (said.kind == NoticeOf::kWithdrawal) {
        on_withdrawal(notice.rank, std::move(said), first);
      }
    }
    if (!lost.empty()) fail_all(rank_failed(own_.name(), lost, why));
    return !notices.empty();
  }

  void on_hello(int rank, CallNotice said) {
    waiting_.insert_or_assign(rank, *std::move(said.hello));
    if (memory_.unaware.erase(rank) == 0) return;
    port_.post({CallNotice{NoticeOf::kHere, said.nonce}.to(rank)}, deadline_);
  }

  // A rank that leaves the call while the coordinator waits in it makes the call fail on all ranks.
  // A rank that left before may be about to arrive again.
  void on_withdrawal(int rank, CallNotice said, bool first) {
    Hello hello = *std::move(said.hello);
    const auto found = waiting_.find(rank);
    const bool seen = found != waiting_.end() && found->second.nonce == said.nonce;
    hello.may_return = first || !seen;
    const bool counts = left_for_good(hello) || !hello.may_return;
    if (counts && same_call(hello, own_)) {
      waiting_.insert_or_assign(rank, std::move(hello));
    } else {
      waiting_.erase(rank);
    }
  }

  // The hellos of the ranks that have arrived.
  std::vector<std::optional<Hello>> present() const {
    std::vector<std::optional<Hello>> hellos(size_);
    for (const auto& [rank, hello] : waiting_) hellos[static_cast<size_t>(rank)] = hello;
    return hellos;
  }

  uint64_t begin() {
    uint64_t number = 0;
    for (const auto& [rank, hello] : waiting_) number = std::max(number, hello.last_operation + 1);
    std::vector<Notice> answers;
    std::map<int, Hello> began = std::exchange(waiting_, {});
    for (const auto& [rank, hello] : began) {
      if (rank == 0) continue;
      answers.push_back(CallNotice{NoticeOf::kGo, hello.nonce, number}.to(rank));
      memory_.answered[rank] = hello.nonce;
    }
    const std::optional<Error> left = let_begin(std::move(answers), number, began);
    if (!left) return number;
    abort_call(port_, *left);
    port_.leave();
    if (left->cause()) std::rethrow_exception(left->cause());
    throw Error(*left);
  }

  // Sends the answers. Returns the error of a rank that left meanwhile: a member that withdrew, or
  // this rank if its caller's code threw. The members may already have their answers by then.
  std::optional<Error> let_begin(std::vector<Notice> answers, uint64_t number,
                                 const std::map<int, Hello>& began) {
    try {
      port_.post(std::move(answers), deadline_);
      port_.enter(number);
      return who_withdrew(began);
    } catch (...) {
      const Error why = current_error().with_rank(0);
      port_.enter(number);
      return why;
    }
  }

  // Looks for withdrawals after the answers were sent. A member that withdraws looks for an answer
  // afterwards. So at least one of the two sees the message of the other.
  std::optional<Error> who_withdrew(const std::map<int, Hello>& began) {
    std::optional<Error> left;
    for (const Notice& notice : port_.newest(Deadline::after(std::chrono::seconds(0)), deadline_)) {
      if (notice.lost) continue;  // the call's operations will report it
      const CallNotice said = CallNotice::from(notice);
      if (said.kind == NoticeOf::kHello) {  // the rank has left and arrived at its next call
        waiting_.insert_or_assign(notice.rank, *said.hello);
        left = Error(ErrorCode::kRankFailed,
                     own_.name() + ": rank " + std::to_string(notice.rank) + " left the call");
        left->with_rank(notice.rank);
      } else if (said.kind == NoticeOf::kWithdrawal && said.nonce == began.at(notice.rank).nonce) {
        left = said.hello->left;
      }
    }
    return left;
  }

  Error mismatch() const {
    return Error(ErrorCode::kMismatch,
                 own_.work + ": the ranks are in different calls: " + who_is_where(present()))
        .with_reason(Reason::kDifferentCalls)
        .with_hint(kHint);
  }

  Error too_late() const {
    const std::vector<std::optional<Hello>> all = present();
    std::vector<int> missing;
    for (int rank = 0; rank < static_cast<int>(size_); ++rank) {
      if (!all[static_cast<size_t>(rank)]) missing.push_back(rank);
    }
    if (missing.empty()) return mismatch();
    port_.missed(missing);
    return nobody_came(own_, missing);
  }

  void fail_with_who_left() {
    for (const auto& [rank, hello] : waiting_) {
      if (hello.left) fail_all(Error(*hello.left));
    }
  }

  void fail_with_who_is_away() {
    for (const auto& [rank, hello] : waiting_) {
      if (hello.may_return) fail_all(not_back(own_, hello, rank));
    }
  }

  // Refuses those that have arrived.
  [[noreturn]] void fail_all(const Error& error) {
    std::vector<Notice> answers;
    std::erase_if(waiting_, [&](const auto& entry) {
      const auto& [rank, hello] = entry;
      if (hello.left) return false;
      if (rank == 0) return true;
      memory_.answered[rank] = hello.nonce;
      answers.push_back(CallNotice{NoticeOf::kRefusal, hello.nonce, 0, {}, error}.to(rank));
      return true;
    });
    port_.post(std::move(answers), farewell_deadline());
    throw error;
  }

  // Leaves the call after an error that is not a result of the rendezvous: an interrupt, or a
  // failure of the port. Every rank gets the error, even a rank that arrives at the call later.
  void leave(Error error) {
    waiting_.erase(0);
    try {
      error.with_rank(0);
      std::vector<Notice> notices;
      for (int rank = 1; rank < static_cast<int>(size_); ++rank) {
        const auto found = waiting_.find(rank);
        if (found != waiting_.end() && !found->second.left) {
          memory_.answered[rank] = found->second.nonce;
          waiting_.erase(found);
        }
        notices.push_back(
            CallNotice{NoticeOf::kWithdrawal, memory_.answered[rank], 0, own_, error}.to(rank));
        memory_.unaware.insert(rank);
      }
      port_.post(std::move(notices), farewell_deadline());
    } catch (...) {
      log(LogLevel::kWarning,
          own_.name() +
              ": could not send this rank's error to the other ranks: " + current_error().what());
    }
  }

  static constexpr std::string_view kHint =
      "all ranks must make the same saves and loads at the same places, in the same order";

  CallPort& port_;
  const size_t size_;
  const Hello& own_;
  const Deadline deadline_;
  CallMemory& memory_;
  std::map<int, Hello>& waiting_;
  Grace grace_;
};

}  // namespace

uint64_t arrive_as_member(CallPort& port, int rank, const Hello& hello, Deadline deadline) {
  return Member(port, rank, hello, deadline).arrive();
}

uint64_t arrive_as_coordinator(CallPort& port, int size, const Hello& own, Deadline deadline) {
  return Coordinator(port, size, own, deadline.sooner(kCoordinatorShare)).arrive();
}

}  // namespace tilestone::comm_internal
