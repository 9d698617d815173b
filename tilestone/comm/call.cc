#include "tilestone/comm/call.h"

#include <algorithm>
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

constexpr double kCoordinatorShare = 0.9;  // of the time: the rest is for telling the others
// A contradiction must last that long before it counts: a rank may be about to withdraw.
constexpr std::chrono::milliseconds kSettle{50};

// ---- What is sent ----

enum class Kind : uint8_t { kHello = 1, kWithdrawal = 2, kGo = 3, kRefusal = 4 };

// kHello: a Hello. kWithdrawal and kRefusal: an Error. kGo: the call's number.
Bytes pack(Kind kind, uint64_t nonce, ByteView content) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(kind));
  writer.u64(nonce);
  writer.raw(content);
  return std::move(writer).take();
}

Bytes pack_go(uint64_t nonce, uint64_t number) {
  ByteWriter content;
  content.u64(number);
  return pack(Kind::kGo, nonce, content.bytes());
}

struct Unpacked {
  Kind kind;
  uint64_t nonce;
  ByteView content;  // borrows
};

Unpacked unpack(ByteView bytes) {
  ByteReader reader(bytes, "notice of a call");
  const auto kind = static_cast<Kind>(reader.u8());
  const uint64_t nonce = reader.u64();
  return {kind, nonce, reader.raw(reader.remaining())};
}

uint64_t unpack_number(ByteView content) {
  ByteReader reader(content, "notice of a call");
  return reader.u64();
}

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

// ---- A member ----

class Member {
 public:
  Member(CallPort& port, const Hello& hello, Deadline deadline)
      : port_(port), hello_(hello), deadline_(deadline) {}

  // The call's number.
  uint64_t come() {
    try {
      port_.post({{0, pack(Kind::kHello, hello_.nonce, hello_.encode()), {}}});
      while (true) {
        if (const std::optional<uint64_t> number = answer(deadline_)) return *number;
        if (deadline_.expired()) throw comm_internal::timed_out(hello_.name(), {0});
      }
    } catch (...) {
      if (!answered_) withdraw();
      throw;
    }
  }

 private:
  // Nothing: no answer yet. Throws what the coordinator refused with.
  std::optional<uint64_t> answer(Deadline deadline) {
    for (const Notice& notice : port_.newest(deadline)) {
      if (notice.lost) throw comm_internal::rank_failed(hello_.name(), {0}, *notice.lost);
      const Unpacked answer = unpack(notice.bytes);
      if (answer.nonce != hello_.nonce) continue;
      answered_ = true;
      if (answer.kind == Kind::kRefusal) throw Error::decode(answer.content);
      return unpack_number(answer.content);
    }
    return std::nullopt;
  }

  // The coordinator may have let the call begin before it saw this.
  void withdraw() {
    const Error why = current_error();
    try {
      port_.post({{0, pack(Kind::kWithdrawal, hello_.nonce, why.encode()), {}}});
      const std::optional<uint64_t> number = answer(Deadline::after(std::chrono::seconds(0)));
      if (!number) return;
      port_.enter(*number);
      port_.abort(why);
      port_.leave();
    } catch (...) {
      log(LogLevel::kDebug, hello_.name() + ": withdrawing: " + current_error().what());
    }
    port_.missed({0});
  }

  CallPort& port_;
  const Hello& hello_;
  const Deadline deadline_;
  bool answered_ = false;
};

// ---- The coordinator ----

class Coordinator {
 public:
  Coordinator(CallPort& port, int size, const Hello& own, Deadline deadline)
      : port_(port),
        size_(static_cast<size_t>(size)),
        own_(own),
        deadline_(deadline),
        waiting_(port.memory().waiting) {}

  uint64_t come() {
    std::erase_if(waiting_, [](const auto& entry) { return entry.second.left.has_value(); });
    waiting_.insert_or_assign(0, own_);
    try {
      return wait_for_all();
    } catch (...) {
      if (waiting_.contains(0)) refuse_for_outside(current_error());
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
      if (fates.front() == Fate::kMismatch) {
        if (!take(Deadline::after(kSettle), false)) fail_all(mismatch());
        continue;
      }
      if (refuse_behind(fates)) continue;
      const bool late = deadline_.expired();
      if (!take(deadline_, false) && late) fail_all(too_late());
    }
  }

  // False when nothing came until the deadline. `first`: what came before this call.
  bool take(Deadline deadline, bool first) {
    std::vector<int> lost;
    std::string why;
    const std::vector<Notice> notices = port_.newest(deadline);
    for (const Notice& notice : notices) {
      if (notice.lost) {
        lost.push_back(notice.rank);
        why = *notice.lost;
        continue;
      }
      const Unpacked said = unpack(notice.bytes);
      if (said.kind == Kind::kHello) {
        waiting_.insert_or_assign(notice.rank, Hello::decode(said.content));
      } else if (said.kind == Kind::kWithdrawal) {
        withdrawn(notice.rank, said, first);
      }
    }
    if (!lost.empty()) fail_all(comm_internal::rank_failed(own_.name(), lost, why));
    return !notices.empty();
  }

  // Who leaves the call that the coordinator is waiting in has failed it for all. Otherwise the
  // rank is just not here any more.
  void withdrawn(int rank, const Unpacked& said, bool first) {
    const auto found = waiting_.find(rank);
    if (found == waiting_.end()) return;
    // One that withdraws a hello which was never seen is newer than the hello that was.
    const bool seen = found->second.nonce == said.nonce;
    if (seen && !first && comm_internal::same_call(found->second, own_)) {
      found->second.left = Error::decode(said.content).with_rank(rank);
    } else {
      waiting_.erase(found);
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
      if (rank != 0) answers.push_back({rank, pack_go(hello.nonce, number), {}});
    }
    port_.post(std::move(answers));
    port_.enter(number);
    end_if_withdrawn(began);
    return number;
  }

  // A rank that withdraws looks for an answer afterwards, and the coordinator for withdrawals after
  // it has answered: one of the two sees the other's.
  void end_if_withdrawn(const std::map<int, Hello>& began) {
    std::optional<Error> left;
    for (const Notice& notice : port_.newest(Deadline::after(std::chrono::seconds(0)))) {
      if (notice.lost) continue;  // the call's operations will say so
      const Unpacked said = unpack(notice.bytes);
      if (said.kind == Kind::kHello) {  // to its next call
        waiting_.insert_or_assign(notice.rank, Hello::decode(said.content));
        left = Error(ErrorCode::kRankFailed, own_.name() + ": a rank left the call");
        left->with_rank(notice.rank);
      } else if (said.kind == Kind::kWithdrawal && said.nonce == began.at(notice.rank).nonce) {
        left = Error::decode(said.content).with_rank(notice.rank);
      }
    }
    if (!left) return;
    port_.abort(*left);
    port_.leave();
    throw Error(*left);
  }

  bool refuse_behind(const std::vector<Fate>& fates) {
    if (std::find(fates.begin(), fates.end(), Fate::kBehind) == fates.end()) return false;
    const std::vector<std::optional<Hello>> all = present();
    std::vector<int> late;
    for (int rank = 0; rank < static_cast<int>(size_); ++rank) {
      if (fates[static_cast<size_t>(rank)] == Fate::kBehind) late.push_back(rank);
    }
    Error error(ErrorCode::kMismatch, own_place_of(late.front()) + ": " +
                                          comm_internal::rank_list(late) +
                                          (late.size() == 1 ? " is" : " are") +
                                          " behind the others; the ranks are in different calls: " +
                                          comm_internal::who_is_where(all));
    error.with_rank(late.front()).with_hint(kHint);
    refuse(late, error);
    if (late.front() == 0) throw error;
    return true;
  }

  std::string own_place_of(int rank) const { return waiting_.at(rank).name(); }

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
    return comm_internal::timed_out(own_.name(), missing);
  }

  void fail_with_who_left() {
    for (const auto& [rank, hello] : waiting_) {
      if (hello.left) fail_all(Error(*hello.left));
    }
  }

  [[noreturn]] void fail_all(const Error& error) {
    refuse_present(error);
    throw error;
  }

  // The error is none that the rendezvous came to: an interrupt, or the port failed.
  void refuse_for_outside(Error error) {
    try {
      refuse_present(error.with_rank(0));
    } catch (...) {
      waiting_.erase(0);
      log(LogLevel::kWarning,
          own_.name() + ": the other ranks could not be told: " + current_error().what());
    }
  }

  void refuse_present(const Error& error) {
    std::vector<int> ranks;
    for (const auto& [rank, hello] : waiting_) ranks.push_back(rank);
    refuse(ranks, error);
  }

  void refuse(const std::vector<int>& ranks, const Error& error) {
    const std::vector<std::byte> content = error.encode();
    std::vector<Notice> answers;
    for (int rank : ranks) {
      const auto hello = waiting_.extract(rank);
      if (rank == 0) continue;
      answers.push_back({rank, pack(Kind::kRefusal, hello.mapped().nonce, content), {}});
    }
    port_.post(std::move(answers));
  }

  static constexpr std::string_view kHint =
      "every rank makes the same saves and loads at the same places, in the same order";

  CallPort& port_;
  const size_t size_;
  const Hello& own_;
  const Deadline deadline_;
  std::map<int, Hello>& waiting_;
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
  const Hello hello = make_hello(*port_, work, place);
  try {
    const uint64_t number =
        comm_.is_coordinator()
            ? Coordinator(*port_, comm_.size(), hello, deadline.sooner(kCoordinatorShare)).come()
            : Member(*port_, hello, deadline).come();
    if (!comm_.is_coordinator()) port_->enter(number);
    remember(port_->memory(), hello, number);
  } catch (...) {
    remember(port_->memory(), hello, std::nullopt);
    end_turn();
    throw;
  }
}

Call::~Call() {
  if (port_ == nullptr) return;
  port_->leave();
  end_turn();
}

void Call::abort(const Error& why) noexcept {
  if (port_ == nullptr) return;
  try {
    Error told = why;
    port_->abort(told.with_rank(comm_.rank()));
  } catch (...) {
    log(LogLevel::kWarning,
        std::string("the other ranks could not be told: ") + current_error().what());
  }
}

void Call::take_turn(Deadline deadline) {
  CallMemory& memory = port_->memory();
  std::unique_lock lock(memory.mutex);
  while (memory.caller) {
    if (memory.caller == std::this_thread::get_id()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "this thread is in a save or load of the same group already");
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
