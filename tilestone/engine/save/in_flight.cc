#include <algorithm>
#include <utility>

#include "tilestone/engine/save/in_flight_internal.h"

namespace tilestone::engine {
namespace {

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

// A failure counts if no rank's program has asked for it, wherever it was noticed.
AfterEarlier consider(const std::vector<InFlight>& ranks) {
  const auto first = [&](InFlight::State state) {
    return std::find_if(ranks.begin(), ranks.end(),
                        [&](const InFlight& rank) { return rank.state == state; });
  };
  if (const auto running = first(InFlight::State::kRunning); running != ranks.end()) {
    if (running->skips) return {AfterEarlier::Way::kSkip, {}, {}};
    return {AfterEarlier::Way::kRefuse, still_running(*running), {}};
  }
  const auto failed = first(InFlight::State::kFailed);
  const bool asked =
      std::any_of(ranks.begin(), ranks.end(), [](const InFlight& rank) { return rank.asked; });
  if (failed == ranks.end() || asked) return {};
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
