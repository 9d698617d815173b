#include "tilestone/engine/save/by_rounds_internal.h"

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/engine/commit/staging_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/save/compare_internal.h"
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

Transaction transaction_of(const Described& own, const Planning& planning) {
  const SaveShare& share = own.share;
  return {own.location,
          share.format,
          share.dialect,
          planning.save_id,
          share.options.overwrite || (share.options.step && share.options.step->replaces),
          share.options.separation_hint};
}

// On the coordinator: what is to be done about the session's earlier save.
class Earlier {
 public:
  explicit Earlier(const Deadline& deadline) : patience_(deadline.sooner(kCoordinatorShare)) {}

  AfterEarlier consider(const Planning& planning) {
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

Bytes answer_of(const AfterEarlier& after) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(Answer::kEarlier));
  after.encode(writer);
  return std::move(writer).take();
}

// For the answer kEarlier: waits a while for the earlier save, if that is the answer, and returns
// what this rank knows of it then. Throws for other answers. `session`: null on a rank that saves
// without one, beside ranks that have one.
InFlight heed_earlier(const Bytes& answer, SessionParts* session, const Rounds& rounds,
                      const Deadline& deadline) {
  ByteReader reader(answer, "what an earlier save has left");
  reader.u8();
  const AfterEarlier after = AfterEarlier::decode(reader);
  if (after.way == AfterEarlier::Way::kWait) {
    const EarlierSave* const earlier = earlier_of(session);
    if (earlier == nullptr) return {};
    return earlier->wait(after.error, rounds.comm().is_coordinator(), deadline);
  }
  const bool was_told = after.way == AfterEarlier::Way::kRaise;
  if (was_told && session != nullptr) session->note_earlier_reported();
  heed(after);
}

// On a rank that has lost the coordinator in the last round: the checkpoint may be published.
std::optional<Bytes> find_published(const PlannedShare& planned, const Error& lost) {
  const SaveShare& share = planned.share;
  if (!has_published(*planned.location, share.format, share.save_id)) return std::nullopt;
  planned.location->sync_directory("");  // the coordinator may have died before it did this
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
  Described own;
  Planning planning;                       // on the coordinator, as all below
  std::optional<Transaction> transaction;  // set once the save has begun

  const auto begin = [&] {
    std::vector<Begun> begun = make_answers(planning, own.share);
    if (saving.publishes) {
      transaction.emplace(transaction_of(own, planning));
      transaction->begin(coordinator_deadline(rounds));
    }
    std::vector<Bytes> answers;
    for (Begun& one : begun) {
      if (transaction) one.staging_name = transaction->staging();
      answers.push_back(one.encode());
      one.orders = Bytes();
    }
    return answers;
  };
  const auto ask_or_begin = [&] {
    std::vector<Bytes> asked = make_orders(planning, own.share, session != nullptr);
    return asked.empty() ? begin() : asked;
  };
  Earlier earlier(rounds.deadline());
  const auto after_earlier = [&] {
    const AfterEarlier after = earlier.consider(planning);
    if (after.way != AfterEarlier::Way::kGoOn) {
      return std::vector<Bytes>(planning.messages.size(), answer_of(after));
    }
    if (!needs_plans(planning)) return ask_or_begin();
    return std::vector<Bytes>(planning.messages.size(), ask_for_plan());
  };

  try {
    Bytes answer = rounds.run(
        "planning",
        [&](Deadline) {
          own = describe(request, rounds.comm().rank(), rounds.comm().size(), session);
          own.terms.insert(own.terms.end(), more_terms.begin(), more_terms.end());
          return first_message(own);
        },
        [&](std::vector<Bytes> messages) {
          planning = planning_of(std::move(messages));
          return after_earlier();
        });
    while (is_answer(answer, Answer::kEarlier)) {
      answer = rounds.run(
          "waiting for the session's previous save",
          [&](const Deadline& deadline) {
            return heed_earlier(answer, session, rounds, deadline).encoded();
          },
          [&](std::vector<Bytes> known) {
            for (size_t rank = 0; rank < known.size(); ++rank) {
              planning.messages[rank].earlier = std::move(known[rank]);
            }
            return after_earlier();
          });
    }
    if (session != nullptr) session->note_earlier_reported();
    if (is_answer(answer, Answer::kSendPlans)) {
      answer = rounds.run(
          "planning", [&](Deadline) { return late_plan(own, session); },
          [&](std::vector<Bytes> plans) {
            add_plans(planning, std::move(plans));
            return ask_or_begin();
          });
    }
    if (is_answer(answer, Answer::kCompare)) {
      const Question question = Question::decode(answer);
      answer = rounds.run(
          "comparing what the ranks hold", [&](Deadline) { return reply_to(own, question); },
          [&](const std::vector<Bytes>& replies) {
            add_replies(planning, replies, own.share);
            return begin();
          });
    }
    saving.planned = follow(std::move(own), Begun::decode(answer), session);
    saving.planned.replicas = std::move(planning.replicas);
    saving.planned.transaction = std::move(transaction);
  } catch (...) {
    if (transaction) transaction->abandon(rounds.comm().size() == 1);
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
    saving.written = rounds.result_or_error([&] {
      try {
        return write_share(saving.planned, kept, rounds.deadline().sooner(kWriteShare));
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kNotFound || rounds.comm().is_coordinator()) throw;
        fail_elsewhere(*saving.planned.location, error.file());
      }
    });
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
  bool tried = false;
  try {
    rounds.run_last(
        "preparing to publish", [](Deadline) { return Bytes(); },
        [&](std::vector<Bytes>) {
          // From here on the checkpoint can't be withdrawn.
          tried = true;
          transaction->commit(coordinator_deadline(rounds).without_interrupt());
          return std::vector<Bytes>();
        },
        [&](const Error& lost) { return find_published(planned, lost); });
  } catch (...) {
    // Only the coordinator knows whether publishing was tried.
    if (transaction && !tried) discard(planned);
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
