#include "tilestone/engine/save/in_background_internal.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/write/writer_internal.h"

namespace tilestone::engine {
namespace {

constexpr double kShareOfCoordinator = 0.9;  // of the time: the others still need to hear of it
// How long after the deadline a rank still looks for the outcome, which says why the save failed.
constexpr std::chrono::duration<double> kLateOutcome{1};
constexpr std::chrono::seconds kUntilOthersHaveWritten{5};

Deadline until_outcome(const Deadline& deadline) {
  if (deadline.is_never()) return deadline;
  return Deadline::after(deadline.remaining() + kLateOutcome).with_interrupt(deadline.interrupt());
}

// Writes what is not staged. The receipt of the rest says what the rank holds.
std::optional<Receipt> write_what_exceeds(PlannedShare& planned, uint64_t most, KeptResources* kept,
                                          const Deadline& deadline) {
  SaveShare& share = planned.share;
  Assignment live = take_what_exceeds(share, most);
  if (live.chunks.empty() && live.copies.empty()) return std::nullopt;
  Assignment staged = std::exchange(share.assignment, std::move(live));
  const bool held = std::exchange(share.list_held, false);
  Receipt receipt = write_assigned(planned, kept, deadline);
  share.assignment = std::move(staged);
  share.list_held = held;
  return receipt;
}

// If this rank has lost the outcome of the last round, the others may have begun to write in the
// background, and wait for its receipt. `meeting`: empty until this rank has ended its step of the
// round; before, every rank hears of its failure.
void leave_failure(const PlannedShare& planned, std::optional<BackgroundMeeting>& meeting,
                   const Error& why) noexcept {
  if (planned.transaction || !meeting) return;
  const bool is_lost = why.code() == ErrorCode::kTimeout || why.code() == ErrorCode::kRankFailed;
  const bool is_own = why.rank() < 0;  // an interrupt, or what a signal's handler has raised
  if (is_lost || is_own) meeting->leave_failure(why);
}

// Opens the storage, and reserves the file of this rank's receipt there.
BackgroundMeeting open_to_meet(PlannedShare& planned, const Deadline& deadline) {
  const SaveShare& share = planned.share;
  open_storage(planned, deadline);
  BackgroundMeeting meeting(planned.storage, share.save_id, share.rank, share.world_size);
  meeting.reserve();
  return meeting;
}

KeptResources* kept_of(SessionParts* session) {
  return session != nullptr ? &session->resources : nullptr;
}

}  // namespace

Assignment take_what_exceeds(SaveShare& share, uint64_t most) {
  Assignment live;
  uint64_t left = most;
  const auto split = [&](std::vector<uint32_t>& chunks, std::vector<uint32_t>& exceeding) {
    std::vector<uint32_t> staged;
    for (const uint32_t i : chunks) {
      const PlanChunk& chunk = share.local.chunks[i];
      const uint64_t bytes = static_cast<uint64_t>(chunk.box.numel()) *
                             itemsize(share.local.tensors[chunk.tensor].dtype);
      const uint64_t room = staging_room(bytes);
      const bool fits = room <= left;
      if (fits) left -= room;
      (fits ? staged : exceeding).push_back(i);
    }
    chunks = std::move(staged);
  };
  split(share.assignment.chunks, live.chunks);
  split(share.assignment.copies, live.copies);
  return live;
}

StagedShare stage_by_rounds(Rounds& rounds, PlannedShare planned, std::optional<uint64_t> most,
                            SessionParts* session, const std::shared_ptr<LazyStaging>& lazy) {
  std::shared_ptr<StagingMemory> memory;
  std::optional<Receipt> written;
  std::optional<BackgroundMeeting> meeting;
  const auto began = StepTimes::Clock::now();
  Bytes whole;
  try {
    whole = rounds.run(
        "staging",
        [&](const Deadline& deadline) {
          std::optional<BackgroundMeeting> own;
          if (planned.hosts == nullptr) own.emplace(open_to_meet(planned, deadline));
          if (most) {
            written = write_what_exceeds(planned, *most, kept_of(session), deadline);
          }
          memory = stage_share(planned, session, deadline, lazy);
          if (own) meeting.emplace(*std::move(own));
          return Bytes{std::byte(!written), std::byte(meeting && meeting->shows_life())};
        },
        [&](const std::vector<Bytes>& ranks) {
          const auto says = [](size_t what) {
            return [what](const Bytes& rank) { return rank.at(what) != std::byte(0); };
          };
          std::vector<bool> claimed;
          std::ranges::transform(ranks, std::back_inserter(claimed), says(1));
          if (meeting) meeting->expect_claims(std::move(claimed));
          const bool all = std::ranges::all_of(ranks, says(0));
          return std::vector<Bytes>(ranks.size(), Bytes{std::byte(all)});
        });
  } catch (...) {
    leave_failure(planned, meeting, current_error());
    meeting.reset();
    discard(planned, Rounds::reached_all(current_error()));
    throw;
  }
  planned.steps.add("staging", began);
  return {std::move(planned), std::move(memory), std::move(written), std::move(meeting),
          whole == Bytes{std::byte(1)}};
}

Receipt write_staged(PlannedShare& planned, std::optional<Receipt>& before, SessionParts* session,
                     const Deadline& deadline) {
  const int first = before ? static_cast<int>(before->files.size()) : 0;
  Receipt receipt = write_share(planned, kept_of(session), deadline, first);
  if (before) receipt = joined_receipts(*std::exchange(before, std::nullopt), std::move(receipt));
  planned.result.items_written = receipt.chunks.size() + receipt.objects.size();
  return receipt;
}

InBackground::InBackground(StagedShare staged, std::shared_ptr<SessionParts> session,
                           Deadline deadline, std::shared_ptr<Hold> hold)
    : planned_(std::move(staged.planned)),
      memory_(std::move(staged.memory)),
      before_(std::move(staged.written)),
      session_(std::move(session)),
      deadline_(std::move(deadline)),
      hold_(std::move(hold)),
      is_coordinator_(planned_.transaction.has_value()),
      meeting_(std::move(staged.meeting).value()) {}

SaveResult InBackground::save() {
  try {
    is_coordinator_ ? publish() : report_and_wait();
  } catch (...) {
    Error error = named(current_error());
    if (planned_.lazy != nullptr) planned_.lazy->end(std::make_exception_ptr(error));
    release();
    session_.reset();
    throw error;
  }
  session_.reset();
  note_published(planned_, reported_, planned_.result);
  return planned_.result;
}

void InBackground::tidy() noexcept {
  if (is_coordinator_) meeting_.tidy();
}

void InBackground::give_up(const Error& why) noexcept {
  if (is_coordinator_) return end_badly(why);
  discard(planned_);
  meeting_.leave_failure(why);
}

// With this rank's number, if the failure is its own.
Error InBackground::named(Error error) const {
  const bool is_own = error.code() == ErrorCode::kIo || error.code() == ErrorCode::kInterrupted ||
                      error.code() == ErrorCode::kInvalidArgument;
  if (is_own && planned_.share.world_size > 1) error.with_rank(planned_.share.rank);
  return error;
}

Receipt InBackground::write() {
  Receipt receipt = write_staged(planned_, before_, session_.get(), deadline_);
  release();
  if (hold_ != nullptr) hold_->pass(deadline_);
  return receipt;
}

void InBackground::note_reported(StepTimes::Clock::time_point began) {
  planned_.steps.add("reporting", began);
  reported_ = StepTimes::Clock::now();
}

// The next save may use the memory.
void InBackground::release() {
  release_tensors(planned_.share);
  memory_.reset();
}

// ---- The coordinator

void InBackground::publish() {
  try {
    Receipt own = write();
    const auto began = StepTimes::Clock::now();
    const Deadline deadline = deadline_.sooner(kShareOfCoordinator);
    const std::vector<Bytes> encoded = meeting_.gather(own.encode(), deadline);
    std::vector<Receipt> receipts;
    for (size_t rank = 0; rank < encoded.size(); ++rank) {
      const bool is_own = static_cast<int>(rank) == planned_.share.rank;
      receipts.push_back(is_own ? std::move(own) : Receipt::decode(encoded[rank]));
    }
    prepare_commit(planned_, std::move(receipts), encoded, deadline);
    note_reported(began);
    if (deadline_.expired()) {
      throw Error(ErrorCode::kTimeout, "the save's deadline passed before it was published");
    }
    planned_.transaction->commit(deadline.without_interrupt());
  } catch (...) {
    end_badly(current_error());
    throw;
  }
  meeting_.end({});
  planned_.transaction->clean();
  planned_.transaction.reset();
}

void InBackground::end_badly(const Error& error) noexcept {
  const bool tried = planned_.transaction->was_tried();
  meeting_.end(BackgroundMeeting::Failed{named(error), tried});
  if (!tried) {
    // The sibling of a save will be gone, and the outcome with it: for ranks that still write, too.
    if (!planned_.sibling.empty()) meeting_.tidy(kUntilOthersHaveWritten);
    discard(planned_);
  }
  planned_.transaction.reset();
}

// ---- The other ranks

void InBackground::report_and_wait() {
  bool may_have_receipt = false;
  try {
    const Receipt receipt = write();
    const auto began = StepTimes::Clock::now();
    may_have_receipt = true;
    meeting_.leave(receipt.encode(), deadline_);
    note_reported(began);
  } catch (...) {
    // A rename whose answer is lost may have left the receipt. Then the coordinator decides.
    if (!may_have_receipt || meeting_.surely_has_none()) {
      meeting_.leave_failure(current_error());
      discard(planned_);
      throw;
    }
    reported_ = StepTimes::Clock::now();
  }
  std::optional<BackgroundMeeting::Failed> failed;
  try {
    failed = meeting_.wait_for_outcome(*planned_.location, planned_.share.format,
                                       until_outcome(deadline_));
  } catch (const Error& error) {
    // The coordinator may be about to publish: this rank's files must stay.
    if (error.code() == ErrorCode::kInterrupted) meeting_.leave_failure(error);
    throw;
  }
  if (!failed) return;
  if (!failed->may_exist) discard(planned_);
  throw std::move(failed->error);
}

}  // namespace tilestone::engine
