#include <algorithm>
#include <utility>

#include "tilestone/engine/save/in_flight_internal.h"

namespace tilestone::engine {
namespace {

Error earlier_failure(const InFlight& rank) {
  const Error& why = *rank.error;
  Error error(why.code(),
              "an earlier asynchronous save has failed: " + rank.what + ": " + why.message());
  error.with_key(why.key()).with_file(why.file()).with_rank(why.rank()).with_hint(why.hint());
  if (why.sys_errno() != 0) error.with_errno(why.sys_errno());
  return error;
}

Error still_running(const InFlight& rank) {
  return Error(ErrorCode::kAlreadyExists,
               "the session's previous save is still in flight: " + rank.what)
      .with_hint("wait for its result, or save with in_flight = wait or skip");
}

}  // namespace

void InFlight::encode(ByteWriter& out) const {
  out.u8(static_cast<uint8_t>(state));
  if (state == State::kNone) return;
  out.u8(asked ? 1 : 0);
  out.u8(warns ? 1 : 0);
  out.u8(skips ? 1 : 0);
  out.string(what);
  if (state == State::kFailed) out.blob(error->encode());
}

InFlight InFlight::decode(ByteReader& in) {
  InFlight rank;
  const uint8_t state = in.u8();
  if (state > static_cast<uint8_t>(State::kFailed)) in.fail("an unknown state of a save in flight");
  rank.state = static_cast<State>(state);
  if (rank.state == State::kNone) return rank;
  rank.asked = in.u8() != 0;
  rank.warns = in.u8() != 0;
  rank.skips = in.u8() != 0;
  rank.what = in.string();
  if (rank.state == State::kFailed) rank.error = Error::decode(in.blob());
  return rank;
}

// A failure counts if the program of any rank that has noticed it has not asked for it. Who
// abandons a save does so for all ranks.
AfterEarlier consider(const std::vector<InFlight>& ranks) {
  const auto first = [&](InFlight::State state) {
    return std::find_if(ranks.begin(), ranks.end(),
                        [&](const InFlight& rank) { return rank.state == state; });
  };
  if (const auto running = first(InFlight::State::kRunning); running != ranks.end()) {
    if (running->skips) return {AfterEarlier::Way::kSkip, {}, {}};
    return {AfterEarlier::Way::kRefuse, still_running(*running), {}};
  }
  const auto failed = std::find_if(ranks.begin(), ranks.end(), [](const InFlight& rank) {
    return rank.state == InFlight::State::kFailed && !rank.asked;
  });
  const bool abandoned = std::any_of(ranks.begin(), ranks.end(), [](const InFlight& rank) {
    return rank.asked && rank.error && rank.error->code() == ErrorCode::kInterrupted;
  });
  if (failed == ranks.end() || abandoned) return {};
  const Error error = earlier_failure(*failed);
  if (failed->warns) return {AfterEarlier::Way::kGoOn, {}, error.what()};
  return {AfterEarlier::Way::kRaise, error, {}};
}

void AfterEarlier::encode(ByteWriter& out) const {
  out.u8(static_cast<uint8_t>(way));
  if (error) out.raw(error->encode());
}

AfterEarlier AfterEarlier::decode(ByteReader& in) {
  AfterEarlier after;
  after.way = static_cast<Way>(in.u8());
  if (after.way == Way::kRefuse || after.way == Way::kRaise) {
    after.error = Error::decode(in.raw(in.remaining()));
  }
  return after;
}

void heed(const AfterEarlier& after) {
  if (after.error) throw *after.error;
  throw SkippedSave();
}

}  // namespace tilestone::engine
