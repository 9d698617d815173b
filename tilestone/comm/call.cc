#include "tilestone/comm/call.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "tilestone/base/log.h"
#include "tilestone/comm/call_port.h"
#include "tilestone/comm/operation_internal.h"
#include "tilestone/comm/rendezvous_internal.h"

namespace tilestone {

using comm_internal::Fate;
using comm_internal::Hello;

CallMemory::CallMemory() = default;
CallMemory::~CallMemory() = default;

namespace {

// The coordinator's share of the remaining time. The rest is for answering the others.
constexpr double kCoordinatorShare = 0.9;
// Contradicting hellos must persist this long before they fail the call: a rank may be about to
// withdraw.
constexpr std::chrono::milliseconds kSettle{50};
constexpr std::chrono::nanoseconds kShortWait = std::chrono::milliseconds(50);

// ---- Messages ----

enum class MessageKind : uint8_t { kHello = 1, kWithdrawal = 2, kGo = 3, kRefusal = 4, kHere = 5 };

// The contents by kind:
//   kHello: a Hello.
//   kWithdrawal: the Hello of the rank that leaves, and its Error.
//   kRefusal: an Error.
//   kGo: the call's number.
//   kHere: empty. It tells a member that the coordinator, which had left, is back.
// The nonce is the nonce of the member's hello. A withdrawal of the coordinator has the nonce of
// the member's hello that it answers now or answered last.
Bytes pack(MessageKind kind, uint64_t nonce, ByteView content) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(kind));
  writer.u64(nonce);
  writer.raw(content);
  return std::move(writer).take();
}

Bytes pack_go(uint64_t nonce, uint64_t number) {
  ByteWriter content;
  content.u64(number);
  return pack(MessageKind::kGo, nonce, content.bytes());
}

Bytes pack_withdrawal(uint64_t nonce, const Hello& hello, const Error& why) {
  ByteWriter content;
  content.blob(hello.encode());
  content.blob(why.encode());
  return pack(MessageKind::kWithdrawal, nonce, content.bytes());
}

struct Unpacked {
  MessageKind kind;
  uint64_t nonce;
  ByteView content;  // a view of the message
};

Unpacked unpack(ByteView bytes) {
  ByteReader reader(bytes, "notice of a call");
  const auto kind = static_cast<MessageKind>(reader.u8());
  const uint64_t nonce = reader.u64();
  return {kind, nonce, reader.raw(reader.remaining())};
}

uint64_t unpack_number(ByteView content) {
  ByteReader reader(content, "notice of a call");
  return reader.u64();
}

Hello unpack_withdrawal(ByteView content, int rank) {
  ByteReader reader(content, "notice of a call");
  Hello hello = Hello::decode(reader.blob());
  hello.left = Error::decode(reader.blob()).with_rank(rank);
  reader.expect_end();
  return hello;
}

// The deadline for the messages of a rank that leaves a call, whether or not its own has passed.
Deadline farewell_deadline() { return Deadline::after(std::chrono::seconds(1)); }

uint64_t random_nonce() {
  std::random_device source;
  return (uint64_t{source()} << 32) ^ source();
}

Hello make_hello(CallPort& port, const std::string& work, const std::string& place) {
  const CallMemory& memory = port.memory();
  Hello hello;
  hello.nonce = random_nonce();
  hello.last_operation = port.last_operation();
  hello.agreed = memory.agreed;
  hello.since = memory.since;
  hello.recent.assign(memory.recent.begin(), memory.recent.end());
  hello.work = work;
  hello.place = place;
  return hello;
}

// A rank that left because its deadline passed counts as late, not as gone.
bool left_for_good(const Hello& hello) {
  return hello.left && hello.left->code() != ErrorCode::kTimeout;
}

Error not_back(const Hello& own, const Hello& away, int rank) {
  return Error(away.left->code(),
               own.name() + ": rank " + std::to_string(rank) +
                   " left the call and did not come back: " + away.left->message())
      .with_rank(rank)
      .with_hint("repeat the call on every rank");
}

Error nobody_came(const Hello& own, const std::vector<int>& missing) {
  const std::string who = comm_internal::rank_list(missing);
  return Error(ErrorCode::kTimeout, own.name() + ": the deadline passed while waiting for " + who +
                                        (missing.size() == 1 ? ", which is" : ", which are") +
                                        " in no save or load on this group")
      .with_rank(missing.front())
      .with_hint("check that all ranks pass the same group; if they do, check what " + who +
                 " did meanwhile, or use a longer timeout");
}

// Measures how long the ranks that have arrived wait for a rank that is away.
class Grace {
 public:
  explicit Grace(std::chrono::duration<double> length) : length_(length) {}

  // `away`: whether a rank is away now. Returns the deadline of the next wait for notices. While a
  // rank is away the waits are short; after each one the caller checks over() and its own deadline.
  Deadline next_wait(bool away, const Deadline& deadline) {
    if (!away) end_.reset();
    if (!away) return deadline;
    if (!end_) end_ = Deadline::after(length_);
    return Deadline::after(std::min({end_->remaining(), deadline.remaining(), kShortWait}));
  }
  bool over() const { return end_ && end_->expired(); }

 private:
  const std::chrono::duration<double> length_;
  std::optional<Deadline> end_;
};

// Sends the error to the other ranks. Never throws.
void abort_call(CallPort& port, const Error& why) {
  try {
    port.abort(why);
  } catch (...) {
    log(LogLevel::kWarning, std::string("could not send this rank's error to the other ranks: ") +
                                current_error().what());
  }
}

// ---- Member: any rank but the coordinator ----

class Member {
 public:
  Member(CallPort& port, const Hello& hello, Deadline deadline)
      : port_(port),
        hello_(hello),
        deadline_(deadline),
        waiting_(port.memory().waiting),
        grace_(port.memory().grace) {}

  // Waits for all ranks. Returns the call's number.
  uint64_t arrive() {
    try {
      port_.post({{0, pack(MessageKind::kHello, hello_.nonce, hello_.encode()), {}}}, deadline_);
      while (true) {
        const Deadline until = grace_.next_wait(coordinator_left(), deadline_);
        if (const std::optional<uint64_t> number = answer(until)) return *number;
        const bool late = deadline_.expired();
        if (coordinator_left() && (late || grace_.over())) {
          throw not_back(hello_, waiting_.at(0), 0);
        }
        if (late) throw comm_internal::timed_out(hello_.name(), {0});
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
      if (notice.lost) throw comm_internal::rank_failed(hello_.name(), {0}, *notice.lost);
      const Unpacked answer = unpack(notice.bytes);
      const bool mine = answer.nonce == hello_.nonce;
      waiting_.erase(0);
      if (answer.kind == MessageKind::kWithdrawal) {
        const Hello left = unpack_withdrawal(answer.content, 0);
        waiting_.insert_or_assign(0, left);
        answered_ = answered_ || mine;
        if (mine) throw Error(*left.left);
      }
      if (!mine || answer.kind == MessageKind::kHere) continue;
      answered_ = true;
      if (answer.kind == MessageKind::kRefusal) throw Error::decode(answer.content);
      return unpack_number(answer.content);
    }
    return std::nullopt;
  }

  bool coordinator_left() const {
    const auto found = waiting_.find(0);
    return found != waiting_.end() && comm_internal::same_call(found->second, hello_);
  }

  // Withdraws the hello. The coordinator may have begun the call before it gets the withdrawal;
  // then the call is aborted.
  void withdraw() {
    const Error why = current_error();
    try {
      limit_ = farewell_deadline();
      port_.post({{0, pack_withdrawal(hello_.nonce, hello_, why), {}}}, limit_);
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
  const Hello& hello_;
  const Deadline deadline_;
  Deadline limit_ = deadline_;  // passed to CallPort::newest
  std::map<int, Hello>& waiting_;
  Grace grace_;
  bool answered_ = false;
};

// ---- Coordinator: rank 0 ----

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
      return hello.left && !(left_for_good(hello) && comm_internal::same_call(hello, own_));
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
    take(Deadline::after(std::chrono::seconds(0)), true);
    while (true) {
      const std::vector<Fate> fates = comm_internal::decide(present());
      if (fates.front() == Fate::kGo) return begin();
      if (fates.front() == Fate::kLeft) fail_with_who_left();
      const bool away = fates.front() == Fate::kAway;
      const Deadline until = grace_.next_wait(away, deadline_);
      if (fates.front() == Fate::kMismatch) {
        if (!take(Deadline::after(kSettle), false)) fail_all(mismatch());
        continue;
      }
      if (refuse_behind(fates)) continue;
      const bool late = deadline_.expired();
      if (take(until, false)) continue;
      if (away && (late || grace_.over())) fail_with_who_is_away();
      if (late) fail_all(too_late());
    }
  }

  // Receives notices until the deadline; returns false if there were none. `first`: the notices
  // arrived before this call began.
  bool take(Deadline deadline, bool first) {
    std::vector<int> lost;
    std::string why;
    const std::vector<Notice> notices = port_.newest(deadline, deadline_);
    for (const Notice& notice : notices) {
      if (notice.lost) {
        lost.push_back(notice.rank);
        why = *notice.lost;
        continue;
      }
      const Unpacked said = unpack(notice.bytes);
      if (said.kind == MessageKind::kHello) {
        on_hello(notice.rank, said);
      } else if (said.kind == MessageKind::kWithdrawal) {
        on_withdrawal(notice.rank, said, first);
      }
    }
    if (!lost.empty()) fail_all(comm_internal::rank_failed(own_.name(), lost, why));
    return !notices.empty();
  }

  void on_hello(int rank, const Unpacked& said) {
    waiting_.insert_or_assign(rank, Hello::decode(said.content));
    if (memory_.unaware.erase(rank) == 0) return;
    port_.post({{rank, pack(MessageKind::kHere, said.nonce, {}), {}}}, deadline_);
  }

  // A rank that leaves the call while the coordinator waits in it makes the call fail on all ranks.
  // A rank that left before may be about to arrive again.
  void on_withdrawal(int rank, const Unpacked& said, bool first) {
    Hello hello = unpack_withdrawal(said.content, rank);
    const auto found = waiting_.find(rank);
    const bool seen = found != waiting_.end() && found->second.nonce == said.nonce;
    hello.may_return = first || !seen;
    const bool counts = left_for_good(hello) || !hello.may_return;
    if (counts && comm_internal::same_call(hello, own_)) {
      waiting_.insert_or_assign(rank, std::move(hello));
    } else {
      waiting_.erase(rank);
    }
  }

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
      answers.push_back({rank, pack_go(hello.nonce, number), {}});
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
      const Unpacked said = unpack(notice.bytes);
      if (said.kind == MessageKind::kHello) {  // the rank has left and arrived at its next call
        waiting_.insert_or_assign(notice.rank, Hello::decode(said.content));
        left = Error(ErrorCode::kRankFailed,
                     own_.name() + ": rank " + std::to_string(notice.rank) + " left the call");
        left->with_rank(notice.rank);
      } else if (said.kind == MessageKind::kWithdrawal &&
                 said.nonce == began.at(notice.rank).nonce) {
        left = unpack_withdrawal(said.content, notice.rank).left;
      }
    }
    return left;
  }

  // Refuses the ranks that are behind; returns false if there are none.
  bool refuse_behind(const std::vector<Fate>& fates) {
    if (std::find(fates.begin(), fates.end(), Fate::kBehind) == fates.end()) return false;
    const std::vector<std::optional<Hello>> all = present();
    std::vector<int> late;
    for (int rank = 0; rank < static_cast<int>(size_); ++rank) {
      if (fates[static_cast<size_t>(rank)] == Fate::kBehind) late.push_back(rank);
    }
    Error error(ErrorCode::kMismatch, call_of(late.front()) + ": " +
                                          comm_internal::rank_list(late) +
                                          (late.size() == 1 ? " is" : " are") +
                                          " behind the others; the ranks are in different calls: " +
                                          comm_internal::who_is_where(all));
    error.with_rank(late.front()).with_hint(kHint);
    refuse(late, error);
    if (late.front() == 0) throw error;
    return true;
  }

  std::string call_of(int rank) const { return waiting_.at(rank).name(); }

  Error mismatch() const {
    return Error(ErrorCode::kMismatch, own_.work + ": the ranks are in different calls: " +
                                           comm_internal::who_is_where(present()))
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

  [[noreturn]] void fail_all(const Error& error) {
    refuse_present(error);
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
        notices.push_back({rank, pack_withdrawal(memory_.answered[rank], own_, error), {}});
        memory_.unaware.insert(rank);
      }
      port_.post(std::move(notices), farewell_deadline());
    } catch (...) {
      log(LogLevel::kWarning,
          own_.name() +
              ": could not send this rank's error to the other ranks: " + current_error().what());
    }
  }

  void refuse_present(const Error& error) {
    std::vector<int> ranks;
    for (const auto& [rank, hello] : waiting_) {
      if (!hello.left) ranks.push_back(rank);
    }
    refuse(ranks, error);
  }

  void refuse(const std::vector<int>& ranks, const Error& error) {
    const std::vector<std::byte> content = error.encode();
    std::vector<Notice> answers;
    for (int rank : ranks) {
      const auto hello = waiting_.extract(rank);
      if (rank == 0) continue;
      memory_.answered[rank] = hello.mapped().nonce;
      answers.push_back({rank, pack(MessageKind::kRefusal, hello.mapped().nonce, content), {}});
    }
    port_.post(std::move(answers), farewell_deadline());
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

void remember(CallMemory& memory, const Hello& hello, std::optional<uint64_t> agreed) {
  memory.recent.push_front(comm_internal::fingerprint(hello.work, hello.place));
  if (memory.recent.size() > comm_internal::kMaxRecentCalls) memory.recent.pop_back();
  memory.since = agreed ? 0 : std::min<uint64_t>(memory.since + 1, memory.recent.size());
  if (agreed) memory.agreed = *agreed;
}

}  // namespace

Call::Call(Communicator comm, std::string work, std::string place, Deadline deadline)
    : comm_(std::move(comm)), port_(comm_.size() > 1 ? comm_.call_port() : nullptr) {
  if (port_ == nullptr) return;
  take_turn(deadline);
  std::optional<Hello> made;
  try {
    const Hello& hello = made.emplace(make_hello(*port_, work, place));
    const uint64_t number =
        comm_.is_coordinator()
            ? Coordinator(*port_, comm_.size(), hello, deadline.sooner(kCoordinatorShare)).arrive()
            : Member(*port_, hello, deadline).arrive();
    if (!comm_.is_coordinator()) port_->enter(number);
    remember(port_->memory(), hello, number);
  } catch (...) {
    if (made) remember(port_->memory(), *made, std::nullopt);
    end_turn();
    throw;
  }
}

Call::~Call() {
  if (port_ == nullptr) return;
  try {
    port_->leave();
  } catch (...) {
    log(LogLevel::kWarning,
        std::string("could not end a save or load properly: ") + current_error().what());
  }
  end_turn();
}

void Call::abort(const Error& why) noexcept {
  if (port_ == nullptr) return;
  Error error = why;
  abort_call(*port_, error.with_rank(comm_.rank()));
}

void Call::take_turn(Deadline deadline) {
  CallMemory& memory = port_->memory();
  std::unique_lock lock(memory.mutex);
  while (memory.caller) {
    if (memory.caller == std::this_thread::get_id()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "this thread is already in a save or load on the same group");
    }
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout,
                  "the deadline passed while another thread used the same group");
    }
    memory.freed.wait_for(lock, deadline.wait_time());
  }
  memory.caller = std::this_thread::get_id();
}

void Call::end_turn() {
  CallMemory& memory = port_->memory();
  const std::lock_guard lock(memory.mutex);
  memory.caller.reset();
  memory.freed.notify_one();
}

}  // namespace tilestone
