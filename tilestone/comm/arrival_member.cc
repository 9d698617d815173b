#include <map>
#include <optional>
#include <string>

#include "tilestone/base/error.h"
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
      if (!mine || answer.kind == NoticeOf::kHere) continue;
      if (answer.kind == NoticeOf::kQuestion) {
        if (!leaving_) say({NoticeOf::kConfirmation, answer.nonce, answer.number}, deadline_);
        continue;
      }
      answered_ = true;
      if (answer.kind == NoticeOf::kRefusal) throw Error(*answer.error);
      return answer.number;
    }
    return std::nullopt;
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
    leaving_ = true;
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
  bool leaving_ = false;
};

}  // namespace

uint64_t arrive_as_member(CallPort& port, int rank, const Hello& hello, Deadline deadline) {
  return Member(port, rank, hello, deadline).arrive();
}

}  // namespace tilestone::comm_internal
