#include <algorithm>
#include <exception>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/run/rounds_internal.h"

namespace tilestone::engine {
namespace {

constexpr double kLocalShare = 0.8;   // of the time that is left at the start of a round
constexpr double kGatherShare = 0.9;  // likewise

constexpr std::chrono::seconds kBrief{1};  // for sending the last outcome after an interrupt

enum class RankStatus : uint8_t { kOk = 0, kError = 1 };

Bytes encode(const std::optional<Error>& error, ByteView payload) {
  ByteWriter writer;
  writer.reserve(payload.size() + 1);
  writer.u8(static_cast<uint8_t>(error ? RankStatus::kError : RankStatus::kOk));
  if (error) {
    writer.raw(error->encode());
  } else {
    writer.raw(payload);
  }
  return std::move(writer).take();
}

Error empty_message(int rank) {
  return Error(ErrorCode::kInternal, "a rank sent an empty message").with_rank(rank);
}

// Returns the error that the message carries, or reduces the message to its payload.
std::optional<Error> decode(Bytes& message, int rank) {
  if (message.empty()) return empty_message(rank);
  const auto status = static_cast<RankStatus>(message.front());
  if (status == RankStatus::kError) return Error::decode(ByteView(message).subspan(1));
  message.erase(message.begin());
  return std::nullopt;
}

// The coordinator's step works for all ranks. An error in it names rank 0 only if that rank's
// machine failed.
bool blames_rank(ErrorCode code) {
  return code == ErrorCode::kIo || code == ErrorCode::kTimeout || code == ErrorCode::kInternal;
}

// Whether the round's messages failed. Any other error comes from a rank that has ended the call,
// and is the same on all ranks.
bool lost_in_round(const Error& error) {
  return error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kRankFailed;
}

Error with_phase(const Error& error, const std::string& what) {
  return error.with_message(what + ": " + error.message());
}

}  // namespace

Rounds::Rounds(Communicator comm, std::string work, std::string location, Deadline deadline)
    : comm_(std::move(comm)),
      work_(std::move(work)),
      deadline_(deadline),
      call_(comm_, work_, std::move(location), deadline_) {}

Bytes Rounds::run(std::string_view phase, const LocalStep& local, const CoordinatorStep& coordinate,
                  bool last, const FindAnswer& find) {
  const Deadline gather_deadline = deadline_.sooner(kGatherShare);
  const RoundResult mine = local_outcome(local, deadline_.sooner(kLocalShare));
  std::vector<Bytes> payloads;
  std::optional<Error> failure = gather(phase, mine, gather_deadline, payloads);
  RoundResult outcome;
  if (comm_.is_coordinator()) {
    std::vector<Bytes> messages;
    outcome = decide(coordinate, std::move(failure), std::move(payloads), messages);
    send_outcome(phase, std::move(messages), outcome, last);
  } else {
    outcome = receive_outcome(phase, failure, last, mine.error ? FindAnswer() : find);
  }
  if (!outcome.error) return std::move(outcome.answer);
  // The exception of this rank's own caller takes precedence over the Error that the others get.
  const Error& error = mine.error && mine.error->cause() ? *mine.error : *outcome.error;
  if (error.cause()) std::rethrow_exception(error.cause());
  throw error;
}

// The status of a message is its last byte, so that the payload, which may be large, is not moved.
Rounds::Messages Rounds::exchange(std::string_view phase, Deadline deadline,
                                  const std::function<Messages()>& local) {
  std::optional<Error> own;
  Messages messages;
  try {
    messages = local();
  } catch (...) {
    own = current_error().with_rank(comm_.rank());
    messages.assign(static_cast<size_t>(comm_.size()), own->encode());
  }
  const RankStatus status = own ? RankStatus::kError : RankStatus::kOk;
  for (Bytes& message : messages) message.push_back(static_cast<std::byte>(status));
  try {
    messages = in_step([&] { return comm_.all_to_all(std::move(messages), deadline); });
  } catch (const Error&) {
    if (own && own->cause()) throw *own;  // it may have ended the call
    throw;
  }
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    Bytes& message = messages[rank];
    if (message.empty()) throw empty_message(static_cast<int>(rank));
    const auto sent = static_cast<RankStatus>(message.back());
    message.pop_back();
    if (sent == RankStatus::kOk) continue;
    // The exception of this rank's own caller takes precedence over the errors of other ranks.
    throw own && own->cause() ? *own : Error::decode(message);
  }
  if (deadline.expired())
    throw Error(ErrorCode::kTimeout, std::string(phase) + ": the deadline passed");
  return messages;
}

Bytes Rounds::broadcast(ByteView bytes, Deadline deadline) {
  if (comm_.size() == 1) return Bytes(bytes.begin(), bytes.end());
  return in_step([&] { return comm_.broadcast(bytes, deadline); });
}

Rounds::RoundResult Rounds::local_outcome(const LocalStep& local, Deadline deadline) {
  if (undelivered_) return {undelivered_, {}};
  try {
    return {std::nullopt, local(deadline)};
  } catch (...) {
    end_if_interrupted();
    return {current_error().with_rank(comm_.rank()), {}};
  }
}

std::optional<Error> Rounds::gather(std::string_view phase, const RoundResult& mine,
                                    Deadline deadline, std::vector<Bytes>& payloads) {
  try {
    // A rank that is late still sends its message, because the coordinator may be waiting for it.
    payloads = comm_.gather(encode(mine.error, mine.answer),
                            comm_.is_coordinator() ? deadline : deadline_);
    return std::nullopt;
  } catch (const Error& error) {
    end_if_interrupted();
    if (error.cause()) end_call();
    if (!comm_.is_coordinator() || !lost_in_round(error)) return error;
    const std::string what =
        error.rank() < 0 ? "not every rank reported after "
                         : "rank " + std::to_string(error.rank()) + " did not report after ";
    return with_phase(error, work_ + ": " + what + std::string(phase));
  } catch (...) {
    end_call();
  }
}

Rounds::RoundResult Rounds::decide(const CoordinatorStep& coordinate, std::optional<Error> failure,
                                   std::vector<Bytes> payloads, std::vector<Bytes>& messages) {
  const auto size = static_cast<size_t>(comm_.size());
  for (size_t rank = 0; rank < payloads.size() && !failure; ++rank) {
    failure = decode(payloads[rank], static_cast<int>(rank));
  }
  std::vector<Bytes> answers;
  if (!failure) {
    try {
      answers = coordinate(std::move(payloads));
    } catch (...) {
      end_if_interrupted();
      Error error = current_error();
      if (blames_rank(error.code()) || error.cause()) error.with_rank(comm_.rank());
      failure = std::move(error);
    }
  }
  answers.resize(size);
  messages.reserve(size);
  for (Bytes& answer : answers) {
    const bool own = &answer == &answers.front();
    messages.push_back(own ? Bytes() : encode(failure, answer));
    if (!own) answer = Bytes();
  }
  return {std::move(failure), std::move(answers.front())};
}

void Rounds::send_outcome(std::string_view phase, std::vector<Bytes> messages,
                          const RoundResult& own, bool last) {
  // The outcome of the last round is final: the others get it even after an interrupt.
  const bool brief = last && interrupted();
  try {
    if (last || own.error) call_.announce_last();
    comm_.scatter(std::move(messages), brief ? Deadline::after(kBrief) : deadline_);
  } catch (const Error& raised) {
    if (!last) end_if_interrupted();
    if (raised.cause()) {  // the caller's code threw it while this rank waited
      if (last) throw;
      end_call();
    }
    const Error error = !lost_in_round(raised)
                            ? raised
                            : with_phase(raised, work_ + ": the outcome of " + std::string(phase) +
                                                     " did not reach every rank");
    if (!own.error || lost_in_round(raised)) log(LogLevel::kWarning, error.what());
    if (!own.error && !last) undelivered_ = error;
  } catch (...) {
    if (!last) end_call();
  }
}

Rounds::RoundResult Rounds::receive_outcome(std::string_view phase,
                                            const std::optional<Error>& unsent, bool last,
                                            const FindAnswer& find) {
  Bytes message;
  try {
    message = comm_.scatter({}, deadline_);
  } catch (const Error& raised) {
    if (last) static_cast<void>(deadline_.expired());  // throws the interrupt's reason
    end_if_interrupted();
    if (raised.cause()) {
      if (last) throw;
      end_call();
    }
    const Error error = unsent ? *unsent : raised;
    if (!lost_in_round(error)) return {error, {}};
    std::optional<Bytes> found = find ? find(error) : std::nullopt;
    if (found) return {std::nullopt, *std::move(found)};
    const Error wrapped = with_phase(
        error, work_ + ": the coordinator (rank 0) gave no answer after " + std::string(phase));
    call_.abort(wrapped);
    return {wrapped, {}};
  } catch (...) {
    if (last) throw;
    end_call();
  }
  std::optional<Error> failure = decode(message, 0);
  return {std::move(failure), std::move(message)};
}

bool Rounds::interrupted() const {
  try {
    static_cast<void>(deadline_.expired());
    return false;
  } catch (...) {
    return true;
  }
}

void Rounds::end_if_interrupted() {
  try {
    static_cast<void>(deadline_.expired());
  } catch (...) {
    end_call();
  }
}

void Rounds::end_call() {
  call_.abort(current_error().with_rank(comm_.rank()));
  throw;
}

}  // namespace tilestone::engine
