#include "tilestone/engine/save/in_flight_internal.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/engine/save/messages_internal.h"

namespace tilestone::engine {
namespace {

// How long a rank waits until the ranks speak about the earlier save again.
constexpr std::chrono::seconds kLongestWait{1};

// Whether the error says only that another rank, or the time, has ended the save.
bool is_hearsay(const Error& error) {
  return error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kRankFailed;
}

Error earlier_failure(const InFlight& rank) {
  const Error& why = *rank.error;
  return why.with_message("an earlier asynchronous save has failed: " + rank.what + ": " +
                          why.message());
}

Error still_running(const InFlight& rank) {
  return Error(ErrorCode::kAlreadyExists,
               "the session's previous save is still in flight: " + rank.what)
      .with_hint("wait for its result, or save with in_flight = wait or skip");
}

// All but the error.
void walk_in_flight(auto& io, auto& rank) {
  using State = InFlight::State;
  both::one_of(io, rank.state, State::kFailed, "an unknown state of a save in flight");
  if (rank.state == State::kNone) return;
  both::flags(io, rank.asked, rank.warns, rank.waits, rank.skips);
  both::text(io, rank.what);
}

}  // namespace

Bytes InFlight::encoded() const {
  ByteWriter out;
  walk_in_flight(out, *this);
  if (state == State::kFailed) out.blob(error->encode());
  return std::move(out).take();
}

InFlight InFlight::decode(ByteView message) {
  ByteReader in(message, "an earlier save");
  InFlight rank;
  walk_in_flight(in, rank);
  if (rank.state == State::kFailed) rank.error = Error::decode(in.blob());
  return rank;
}

InFlight EarlierSave::look() const {
  InFlight rank;
  rank.what = durable->what();
  rank.warns = warns;
  if (!durable->done()) {
    rank.state = InFlight::State::kRunning;
    rank.waits = waits;
    rank.skips = skips;
    return rank;
  }
  const std::exception_ptr failure = durable->failure(false);
  if (failure == nullptr) return {};
  rank.state = InFlight::State::kFailed;
  rank.asked = durable->was_asked();
  try {
    std::rethrow_exception(failure);
  } catch (...) {
    rank.error = current_error();
  }
  return rank;
}

InFlight EarlierSave::wait(const std::optional<Error>& failure, bool is_coordinator,
                           const Deadline& deadline) const {
  const auto end = [&] { interrupt->request(std::make_exception_ptr(*failure)); };
  if (failure && is_coordinator) end();
  const auto time = std::min<std::chrono::nanoseconds>(kLongestWait, deadline.remaining());
  const bool ended = durable->wait(Deadline::after(time).with_interrupt(deadline.interrupt()));
  if (failure && !ended) end();
  return look();
}

// A failure counts if the program of any rank that has noticed it has not asked for it. Who
// abandons a save does so for all ranks.
AfterEarlier consider(const std::vector<InFlight>& ranks, bool patient) {
  const auto first = [&](const auto& holds) {
    return std::find_if(ranks.begin(), ranks.end(), holds);
  };
  const auto running =
      first([](const InFlight& rank) { return rank.state == InFlight::State::kRunning; });
  auto failed = first([](const InFlight& rank) { return rank.error && !is_hearsay(*rank.error); });
  if (failed == ranks.end())
    failed = first([](const InFlight& rank) { return rank.error.has_value(); });
  const bool has_failed = failed != ranks.end();
  if (running != ranks.end()) {
    if (patient && (has_failed || running->waits)) {
      return {AfterEarlier::Way::kWait, has_failed ? failed->error : std::nullopt, {}};
    }
    if (!has_failed && running->skips) return {AfterEarlier::Way::kSkip, {}, {}};
    if (!has_failed) return {AfterEarlier::Way::kRefuse, still_running(*running), {}};
  }
  const bool unasked = std::any_of(ranks.begin(), ranks.end(), [](const InFlight& rank) {
    return rank.state == InFlight::State::kFailed && !rank.asked;
  });
  const bool abandoned = std::any_of(ranks.begin(), ranks.end(), [](const InFlight& rank) {
    return rank.asked && rank.error && rank.error->code() == ErrorCode::kInterrupted;
  });
  if (!unasked || abandoned) return {};
  const Error error = earlier_failure(*failed);
  if (failed->warns) return {AfterEarlier::Way::kGoOn, {}, error.what()};
  return {AfterEarlier::Way::kRaise, error, {}};
}

Bytes AfterEarlier::encode() const {
  ByteWriter out;
  out.u8(static_cast<uint8_t>(Answer::kEarlier));
  out.u8(static_cast<uint8_t>(way));
  if (error) out.raw(error->encode());
  return std::move(out).take();
}

AfterEarlier AfterEarlier::decode(ByteView answer) {
  ByteReader in(answer, "what an earlier save has left");
  in.u8();
  AfterEarlier after;
  after.way = static_cast<Way>(in.u8());
  if (after.way != Way::kSkip && in.remaining() > 0) {
    after.error = Error::decode(in.raw(in.remaining()));
  }
  return after;
}

void heed(const AfterEarlier& after) {
  if (after.error) throw *after.error;
  throw SkippedSave();
}

}  // namespace tilestone::engine
