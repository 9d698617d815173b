#include "tilestone/engine/save/by_rounds_internal.h"

#include <chrono>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/save/described_internal.h"
#include "tilestone/engine/save/in_flight_internal.h"
#include "tilestone/engine/save/messages_internal.h"
#include "tilestone/engine/save/orders_internal.h"

namespace tilestone::engine {
namespace {

constexpr double kCoordinatorShare = 0.8;  // of the remaining time
constexpr double kWriteShare = 0.8;        // likewise, as for the local step of a round

// Ends early enough that the coordinator can still answer the other ranks.
Deadline coordinator_deadline(const Rounds& rounds) {
  return rounds.deadline().sooner(kCoordinatorShare);
}

Transaction transaction_of(const RankPlanning& own, const CoordinatorPlanning& planning) {
  const SaveShare& share = own.share;
  return {own.location,
          share.format,
          share.dialect,
          planning.save_id,
          share.options.overwrite || (share.options.step && share.options.step->replaces),
          share.options.separation_hint,
          share.one_writer};
}

// On the coordinator: what is to be done about the session's earlier save.
class Earlier {
 public:
  explicit Earlier(const Deadline& deadline) : patience_(deadline.sooner(kCoordinatorShare)) {}

  AfterEarlier consider(const CoordinatorPlanning& planning) {
    std::vector<InFlight> ranks;
    for (const PlanMessage& message : planning.messages) {
      ranks.push_back(InFlight::decode(message.earlier));
    }
    const AfterEarlier after = engine::consider(ranks, !patience_.expired());
    const bool waits = after.way == AfterEarlier::Way::kWait;
    if (waits && after.error && !std::exchange(has_failed_, true)) {
      patience_ = patience_.remaining() > kWaitForEnd ? Deadline::after(kWaitForEnd) : patience_;
    }
    return after;
  }

 private:
  static constexpr std::chrono::seconds kWaitForEnd{5};  // of ranks, after the failure of another
  Deadline patience_;
  bool has_failed_ = false;
};

// The coordinator's part of the planning: takes what the ranks have replied to its last answers,
// and answers them until they have their orders. Begins the save at the location just before that.
class Coordinator {
 public:
  Coordinator(SavingByRounds& saving, const RankPlanning& own, bool keeps_plans)
      : saving_(saving), own_(own), keeps_plans_(keeps_plans), earlier_(saving.rounds.deadline()) {}

  std::vector<Bytes> take_first(std::vector<Bytes> messages) {
    planning_ = planning_of(std::move(messages));
    return after_earlier();
  }

  // `asked`: what was answered before.
  std::vector<Bytes> take(Answer asked, std::vector<Bytes> replies) {
    switch (asked) {
      case Answer::kEarlier:
        for (size_t rank = 0; rank < replies.size(); ++rank) {
          planning_.messages[rank].earlier = std::move(replies[rank]);
        }
        return after_earlier();
      case Answer::kSendPlans:
        add_plans(planning_, std::move(replies));
        return ask_or_begin();
      default:
        add_replies(planning_, replies, own_.share);
        return begin();
    }
  }

  // Hands over to the share with which the save goes on.
  void hand_over(PlannedShare& planned) {
    planned.replicas = std::move(planning_.replicas);
    planned.transaction = std::move(transaction_);
  }
  void abandon() {
    if (transaction_) transaction_->abandon(saving_.rounds.comm().size() == 1);
  }

 private:
  std::vector<Bytes> to_all(const Bytes& answer) const {
    return std::vector<Bytes>(planning_.messages.size(), answer);
  }

  std::vector<Bytes> after_earlier() {
    const AfterEarlier after = earlier_.consider(planning_);
    if (after.way != AfterEarlier::Way::kGoOn) return to_all(after.encode());
    return needs_plans(planning_) ? to_all(ask_for_plan()) : ask_or_begin();
  }

  std::vector<Bytes> ask_or_begin() {
    std::vector<Bytes> asked = make_orders(planning_, own_.share, keeps_plans_);
    return asked.empty() ? begin() : asked;
  }

  std::vector<Bytes> begin() {
    end_planning(planning_, own_.share);
    if (saving_.publishes) {
      transaction_.emplace(transaction_of(own_, planning_));
      transaction_->begin(coordinator_deadline(saving_.rounds));
    }
    std::vector<Bytes> answers;
    for (Orders& one : planning_.orders) {
      if (transaction_) one.sibling = transaction_->sibling();
      answers.push_back(std::exchange(one, {}).encode());
    }
    return answers;
  }

  SavingByRounds& saving_;
  const RankPlanning& own_;
  bool keeps_plans_;
  Earlier earlier_;
  CoordinatorPlanning planning_;
  std::optional<Transaction> transaction_;  // set once the save has begun
};

// For the answer kEarlier: waits a while for the earlier save, if that is the answer, and returns
// what this rank knows of it then. Throws for other answers. `session`: null on a rank that saves
// without one, beside ranks that have one.
InFlight heed_earlier(const Bytes& answer, SessionParts* session, const Rounds& rounds,
                      const Deadline& deadline) {
  const AfterEarlier after = AfterEarlier::decode(answer);
  if (after.way == AfterEarlier::Way::kWait) {
    const EarlierSave* const earlier = earlier_of(session);
    if (earlier == nullptr) return {};
    return earlier->wait(after.error, rounds.comm().is_coordinator(), deadline);
  }
  const bool was_told = after.way == AfterEarlier::Way::kRaise;
  if (was_told && session != nullptr) session->note_earlier_reported();
  heed(after);
}

std::string_view phase_of(Answer answer) {
  if (answer == Answer::kEarlier) return "waiting for the session's previous save";
  return answer == Answer::kCompare ? "comparing what the ranks hold" : "planning";
}

// What a rank replies to an answer other than kOrders.
Bytes reply(const Bytes& answer, RankPlanning& own, SessionParts* session, const Rounds& rounds,
            const Deadline& deadline) {
  switch (kind_of(answer)) {
    case Answer::kEarlier:
      return heed_earlier(answer, session, rounds, deadline).encoded();
    case Answer::kSendPlans:
      return late_plan(own, session);
    default:
      return reply_to(own, Question::decode(answer));
  }
}

// On a rank that has lost the coordinator in the last round: the checkpoint may be published.
std::optional<Bytes> find_published(const PlannedShare& planned, const Error& lost) {
  const SaveShare& share = planned.share;
  if (!holds_checkpoint_of(*planned.location, share.format, share.save_id)) return std::nullopt;
  planned.location->settle("");  // the coordinator may have died before it did this
  log(LogLevel::kWarning,
      "save: the checkpoint at " + planned.location->describe() +
          " is published, but the coordinator (rank 0) gave no answer: " + lost.message());
  return Bytes();
}

}  // namespace

SavingByRounds::SavingByRounds(const Communicator& comm, const std::string& name,
                               const std::string& location, Deadline deadline)
    : rounds(comm, name, location, deadline) {
  planned.share.rank = comm.rank();
  planned.share.world_size = comm.size();
}

// Changes nothing at the location before the ranks have agreed on everything that needs agreement.
void plan_step(SavingByRounds& saving, const MadeRequest& request, SessionParts* session,
               const Terms& more_terms) {
  Rounds& rounds = saving.rounds;
  RankPlanning own;
  Coordinator coordinator(saving, own, session != nullptr);
  try {
    Bytes answer = rounds.run(
        "planning",
        [&](Deadline) {
          own = describe(request, rounds.comm().rank(), rounds.comm().size(), session);
          own.location = own.location->until(rounds.deadline());
          own.terms.insert(own.terms.end(), more_terms.begin(), more_terms.end());
          return first_message(own);
        },
        [&](std::vector<Bytes> messages) { return coordinator.take_first(std::move(messages)); });
    while (kind_of(answer) != Answer::kOrders) {
      const Answer asked = kind_of(answer);
      if (asked != Answer::kEarlier && session != nullptr) session->note_earlier_reported();
      answer = rounds.run(
          phase_of(asked),
          [&](const Deadline& deadline) { return reply(answer, own, session, rounds, deadline); },
          [&](std::vector<Bytes> replies) { return coordinator.take(asked, std::move(replies)); });
    }
    if (session != nullptr) session->note_earlier_reported();
    saving.planned = follow(std::move(own), Orders::decode(answer), session);
    coordinator.hand_over(saving.planned);
  } catch (...) {
    coordinator.abandon();
    throw;
  }
}

void write_step(SavingByRounds& saving, KeptResources* kept) {
  Rounds& rounds = saving.rounds;
  if (rounds.undelivered()) {
    saving.written = *rounds.undelivered();
    return;
  }
  try {
    saving.written = rounds.result_or_error(
        [&] { return write_share(saving.planned, kept, rounds.deadline().sooner(kWriteShare)); });
  } catch (...) {
    discard(saving.planned);
    throw;
  }
}

void report_step(SavingByRounds& saving) {
  PlannedShare& planned = saving.planned;
  Written written = *std::move(saving.written);
  const auto own = static_cast<size_t>(planned.share.rank);
  try {
    saving.rounds.run(
        "writing",
        [&](Deadline) {
          if (const Error* const failed = std::get_if<Error>(&written)) throw *failed;
          return std::get<Receipt>(written).encode();
        },
        [&](const std::vector<Bytes>& payloads) {
          std::vector<Receipt> receipts;
          for (size_t rank = 0; rank < payloads.size(); ++rank) {
            receipts.push_back(rank == own ? std::move(std::get<Receipt>(written))
                                           : Receipt::decode(payloads[rank]));
          }
          prepare_commit(planned, std::move(receipts), payloads,
                         coordinator_deadline(saving.rounds));
          return std::vector<Bytes>();
        });
  } catch (...) {
    // The coordinator will accept no receipt of this rank, so the save can't be published.
    discard(planned, Rounds::reached_all(current_error()));
    throw;
  }
}

SaveResult publish_step(SavingByRounds& saving) {
  Rounds& rounds = saving.rounds;
  PlannedShare& planned = saving.planned;
  std::optional<Transaction>& transaction = planned.transaction;
  try {
    rounds.run_last(
        "preparing to publish", [](Deadline) { return Bytes(); },
        [&](std::vector<Bytes>) {
          // From here on the checkpoint can't be withdrawn.
          transaction->commit(coordinator_deadline(rounds).without_interrupt());
          return std::vector<Bytes>();
        },
        [&](const Error& lost) { return find_published(planned, lost); });
  } catch (...) {
    if (transaction) discard(planned);  // only the coordinator knows whether publishing was tried
    throw;
  }
  if (transaction) transaction->clean();
  return planned.result;
}

// The other ranks can't publish: this rank has not taken part in the last round.
void give_up_save(SavingByRounds& saving, const Error& why) noexcept {
  saving.rounds.leave(why);
  discard(saving.planned);
}

}  // namespace tilestone::engine
