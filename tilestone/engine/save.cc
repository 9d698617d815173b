#include "tilestone/engine/save.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/common_state_internal.h"
#include "tilestone/engine/compare_internal.h"
#include "tilestone/engine/coordination_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/orders_internal.h"
#include "tilestone/engine/run/differing_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/rounds_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/save_share_internal.h"
#include "tilestone/engine/save_steps_internal.h"
#include "tilestone/engine/session_parts_internal.h"
#include "tilestone/plan/access.h"
#include "tilestone/state/content_hash.h"

namespace tilestone {
namespace engine {
namespace {

constexpr double kCoordinatorShare = 0.8;  // of the remaining time

// The kind of the coordinator's answer to the planning messages.
//  - kOrders: the ranks' orders.
//  - kCompare: the ranks may hold different versions of what only one of them writes. Each rank
//    answers the question that it gets, so that keys can be named.
//  - kSendPlans: the ranks that have sent no plan must send it, because another rank's plan has
//    changed.
enum class Answer : uint8_t { kOrders, kCompare, kSendPlans };

Bytes ask(const Question& question) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(Answer::kCompare));
  writer.raw(question.encode());
  return std::move(writer).take();
}

// `staging`: the name of the directory beside the location into which a staged save writes; "": the
// save is not staged. `lost`: keys of which another rank's version is saved.
Bytes answer_of(const std::string& staging, const std::vector<std::string>& lost, ByteView orders) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(Answer::kOrders));
  writer.string(staging);
  writer.varint(lost.size());
  for (const std::string& key : lost) writer.string(key);
  writer.raw(orders);
  return std::move(writer).take();
}

bool is(const Bytes& answer, Answer kind) {
  return !answer.empty() && answer.front() == static_cast<std::byte>(kind);
}

// Coordinates a save by rounds of a communicator.
class CoordinationByRounds final : public Coordination {
 public:
  CoordinationByRounds(Communicator comm, const std::string& place, Deadline deadline,
                       std::shared_ptr<SessionParts> session)
      : Coordination(deadline, std::move(session)),
        comm_(std::move(comm)),
        rounds_(comm_, "save", place, deadline) {
    share_.rank = comm_.rank();
    share_.world_size = comm_.size();
  }

  void plan(const Bring& bring) override {
    try {
      agree(bring);
    } catch (...) {
      if (transaction_) transaction_->abandon(is_alone());
      throw;
    }
  }

  void write(const WriteShare& write) override {
    try {
      rounds_.begin("writing", [&](Deadline deadline) {
        if (!staging_name_.empty()) staging_ = staging_storage(location_->storage(), staging_name_);
        report_ = write({&storage(), 0, deadline});
        note_result();
        return report_.encode();
      });
    } catch (...) {
      discard();
      throw;
    }
  }

  void report() override {
    try {
      rounds_.end([&](const std::vector<Bytes>& payloads) {
        prepare_to_publish(payloads);
        return std::vector<Bytes>();
      });
    } catch (...) {
      // The coordinator will accept no report of this rank, so the save can't be published.
      discard();
      throw;
    }
  }

  SaveResult publish() override {
    bool tried = false;
    try {
      rounds_.run_last(
          "preparing to publish", [](Deadline) { return Bytes(); },
          [&](std::vector<Bytes>) {
            // From here on the checkpoint can't be withdrawn.
            tried = true;
            transaction_->commit(coordinator_deadline().without_interrupt());
            return std::vector<Bytes>();
          },
          [&](const Error& lost) { return find_published(lost); });
    } catch (...) {
      // Only the coordinator knows whether publishing was tried.
      if (transaction_ && !tried) discard();
      throw;
    }
    if (transaction_) transaction_->clean();
    return result_;
  }

  // The other ranks can't publish: this rank has not taken part in the last round.
  void give_up(const Error& why) noexcept override {
    rounds_.leave(why);
    discard();
  }

 private:
  bool is_alone() const { return comm_.size() == 1; }
  const SaveOptions& options() const { return share_.options; }
  Storage& storage() const { return staging_ != nullptr ? *staging_ : location_->storage(); }

  // Changes nothing at the location before the ranks have agreed on everything that needs
  // agreement.
  void agree(const Bring& bring) {
    const auto describe = [&](Deadline) { return first_message(bring); };
    Bytes answer = rounds_.run("planning", describe, [&](std::vector<Bytes> messages) {
      take_messages(messages);
      return have_all_plans() ? consider_plans()
                              : std::vector<Bytes>(messages_.size(), ask_for_plans());
    });
    if (is(answer, Answer::kSendPlans)) answer = send_plans();
    if (is(answer, Answer::kCompare)) answer = compare(answer);
    ByteReader reader(answer, "orders of a save");
    reader.u8();
    staging_name_ = reader.string();
    std::vector<std::string> lost(reader.count());
    for (std::string& key : lost) key = reader.string();
    // As in Megatron-Core, where each rank says that its common state differs.
    if (!share_.dialect->common_object().empty()) tell_of_lost(comm_.rank(), lost);
    take_orders(Orders::decode(reader.raw(reader.remaining())));
  }

  Bytes first_message(const Bring& bring) {
    const Brought brought = prepare(bring);
    return with_terms(plan_locally(brought).encode(), terms_of(*location_, options()));
  }

  void take_messages(std::vector<Bytes>& messages) {
    agree_on_terms(messages);
    for (Bytes& message : messages) {
      messages_.push_back(PlanMessage::decode(std::move(message)));
      merge_replica_names(replica_names_, messages_.back().replicas);
    }
  }

  // Runs on the coordinator. True if all ranks have sent their plans, or if all may use their
  // cached ones.
  bool have_all_plans() {
    as_before_ = all_as_before(messages_);
    return as_before_ ||
           std::all_of(messages_.begin(), messages_.end(),
                       [](const PlanMessage& message) { return message.made_in.empty(); });
  }

  static Bytes ask_for_plans() { return Bytes(1, static_cast<std::byte>(Answer::kSendPlans)); }

  // Sends the plan if this rank has not sent it yet.
  Bytes send_plans() {
    const bool unsent = cached_.has_value();
    cached_.reset();
    for (PlanChunk& chunk : share_.local.chunks) {
      if (!is_compared(share_.local, chunk)) chunk.content = 0;  // was contested in that plan
    }
    return rounds_.run(
        "planning", [&](Deadline) { return unsent ? encoded_plan() : Bytes(); },
        [&](std::vector<Bytes> plans) {
          for (size_t rank = 0; rank < plans.size(); ++rank) {
            if (!plans[rank].empty()) messages_[rank].plan = std::move(plans[rank]);
          }
          // Their plans have the contents. Earlier groups are not those of the new plan.
          for (PlanMessage& message : messages_) message.contents.clear();
          return consider_plans();
        });
  }

  // Runs on the coordinator.
  std::vector<Bytes> consider_plans() {
    if (options().checks.access && !as_before_) validate();
    make_orders();
    others_ = differing_ranks(messages_);
    const std::vector<Question> questions = questions_of(messages_, others_, contested_);
    if (questions.empty()) return begin();
    std::vector<Bytes> asked;
    for (const Question& question : questions) asked.push_back(ask(question));
    return asked;
  }

  void take_orders(Orders orders) {
    if (orders.way == Orders::Way::kAsBefore) {
      if (!cached_) {
        throw Error(ErrorCode::kInternal,
                    "rank 0 expects a cached plan that this rank does not have");
      }
      orders.assignment = std::move(cached_->assignment);
      orders.grids = std::move(cached_->grids);
      session_->count({0, 0, 1, 0});
    } else if (structure_ && !orders.groups.empty()) {
      session_->plans.put({*structure_, orders.save_id, orders.assignment, orders.grids,
                           ContentGroups::decode(orders.groups, share_.local.objects.size(),
                                                 share_.local.chunks.size())});
      session_->count({0, 1, 0, 0});
    }
    share_.save_id = orders.save_id;
    share_.assignment = std::move(orders.assignment);
    settle_copies(share_, result_);
    if (share_.format->needs_grid()) take_grids(share_, orders.grids);
  }

  // Answers the coordinator's question. The coordinator reports what differs.
  Bytes compare(ByteView asked) {
    const Question question = Question::decode(asked.subspan(1));
    result_.common_differs = question.other >= 0;
    return rounds_.run(
        "comparing what the ranks hold", [&](Deadline) { return reply_to(question).encode(); },
        [&](const std::vector<Bytes>& replies) {
          take_replies(replies);
          return begin();
        });
  }

  Reply reply_to(const Question& question) {
    Reply reply;
    const bool is_asked = comm_.rank() == 0 || comm_.rank() == question.other;
    if (question.other >= 0 && is_asked) reply.parts = encode_parts(*compared_);
    if (question.lists) reply.lists = std::move(share_.lists);
    note_chunks(share_, question.chunks);
    reply.contents = named_contents(share_.local, groups(), question.groups, question.chunks,
                                    cached_ ? cached_->assignment : share_.assignment);
    return reply;
  }

  // Runs on the coordinator.
  void take_replies(const std::vector<Bytes>& encoded) {
    std::vector<Reply> replies;
    for (const Bytes& one : encoded) replies.push_back(Reply::decode(one));
    std::vector<std::vector<ListLength>> lists;
    std::vector<std::vector<NamedContent>> contents;
    for (Reply& reply : replies) {
      lists.push_back(std::move(reply.lists));
      contents.push_back(std::move(reply.contents));
    }
    expect_same_lengths(lists, share_.items.common.has_value());
    if (!others_.empty()) {
      tell_of_other_state(replies.front().parts,
                          replies.at(static_cast<size_t>(others_.front())).parts, others_,
                          options().checks.common_differs);
    }
    for (DifferingContent& one : differences_of(contents)) differing_.push_back(std::move(one));
    sort_by_key(differing_);
  }

  // Runs on the coordinator after all comparisons: begins the save at the location.
  std::vector<Bytes> begin() {
    tell_of_differing(differing_, options().checks.common_differs, share_.dialect->name());
    const auto lost = lost_of(differing_, messages_.size());
    messages_.clear();
    transaction_.emplace(location_->shared(), share_.format, share_.dialect, save_id_,
                         options().overwrite);
    transaction_->begin(coordinator_deadline());
    for (size_t rank = 0; rank < orders_.size(); ++rank) {
      orders_[rank] = answer_of(transaction_->staging(), lost[rank], orders_[rank]);
    }
    return std::move(orders_);
  }

  // Runs on the coordinator.
  void make_orders() {
    save_id_ = random_save_id();
    if (as_before_) {
      orders_ = orders_as_before(messages_.size(), save_id_);
    } else if (is_alone()) {
      orders_ = orders_for_one(share_.local, save_id_, *share_.format);
    } else {
      ExchangedOrders made =
          orders_by_exchange(messages_, save_id_, *share_.format, session_ != nullptr);
      orders_ = std::move(made.orders);
      differing_ = std::move(made.differing);
      contested_ = std::move(made.contested);
    }
    if (!compares()) contested_.clear();
  }

  // With whom this rank compares what; empty: it does not know without the coordinator.
  ContentGroups groups() const { return cached_ ? cached_->groups : ContentGroups(); }

  void validate() const {
    std::vector<ByteView> plans;
    for (const PlanMessage& message : messages_) plans.emplace_back(message.plan);
    check_access(plans);
  }

  Brought prepare(const Bring& bring) {
    const Brought brought = bring();
    location_ = *brought.location;
    set_options(share_, *brought.options);
    check_options(options());
    return brought;
  }

  PlanMessage plan_locally(const Brought& brought) {
    take_state(share_, *brought.state);
    check_items(share_, location_->storage());
    std::vector<int> group = replicate_group_of(share_);
    share_.local = make_local_plan(share_.items);
    if (!group.empty()) note_contents_of_copied(share_);
    look_for_plan();
    PlanMessage message;
    message.replicas = replicas_to_name(share_);
    if (!is_alone()) message.lists = hash_of(share_.lists);
    message.group = std::move(group);
    if (compares()) {
      message.common = hash_of_common(brought);
      // The planner copies each common object whose content is noted.
      note_contents(share_, share_.items.common.has_value(), groups());
      message.contents = contents_by_group(share_.local, groups());
    }
    if (cached_) {
      message.made_in = cached_->made_in;
    } else if (!is_alone() || options().checks.access) {
      message.plan = encoded_plan();
    }
    return message;
  }

  // Looks for the plan of an earlier save of the session in which this rank had the same structure.
  void look_for_plan() {
    if (session_ == nullptr || is_alone()) return;
    structure_ = structure_of(share_, PlannedBy::kExchange);
    const CachedPlan* const found = session_->plans.find(*structure_);
    if (found != nullptr) cached_ = *found;
  }

  Bytes encoded_plan() const {
    Bytes plan = share_.local.encode();
    if (session_ != nullptr) session_->count({0, 0, 0, plan.size()});
    return plan;
  }

  // True if the ranks compare what should be equal on all of them.
  bool compares() const {
    return !is_alone() && options().checks.common_differs != Checks::Differing::kIgnore;
  }

  // Hash of the common state; 0 in dialects without a common state.
  uint64_t hash_of_common(const Brought& brought) {
    if (!share_.items.common) return 0;
    compared_ = brought.compared != nullptr ? items_of(*brought.compared, share_).common
                                            : share_.items.common;
    return content_hash(*compared_);
  }

  void prepare_to_publish(const std::vector<Bytes>& payloads) {
    const auto own = static_cast<size_t>(comm_.rank());
    std::vector<RankReport> reports;
    for (size_t rank = 0; rank < payloads.size(); ++rank) {
      reports.push_back(rank == own ? std::move(report_) : RankReport::decode(payloads[rank]));
    }
    transaction_->prepare(
        {.save = {.reports = std::move(reports),
                  .encoded = payloads,
                  .copies = copy_policy(),
                  .attributes = options().attributes,
                  .of_dialect = share_.dialect->encode_index(share_.items, *share_.format),
                  .replicas = std::move(replica_names_)},
         .threads = options().resources.threads},
        coordinator_deadline());
  }

  CopyPolicy copy_policy() const {
    const bool copies = options().copies.has_value();
    return copies ? CopyPolicy::kReported : CopyPolicy::kRefuse;
  }

  void note_result() {
    result_.save_id = share_.save_id;
    result_.items_written = report_.chunks.size() + report_.objects.size();
    for (const ReportedFile& file : report_.files) {
      result_.bytes_written += file.size;
      written_.push_back(file.name);
    }
  }

  // Runs on a rank that has lost the coordinator in the last round: the checkpoint may be
  // published.
  std::optional<Bytes> find_published(const Error& lost) const {
    if (!has_published(location_->storage(), share_.format, share_.save_id)) return std::nullopt;
    log(LogLevel::kWarning,
        "save: the checkpoint at " + location_->storage().describe() +
            " is published, but the coordinator (rank 0) gave no answer: " + lost.message());
    return Bytes();
  }

  // Ends early enough that the coordinator can still answer the other ranks.
  Deadline coordinator_deadline() const { return deadline_.sooner(kCoordinatorShare); }

  void discard() {
    remove_files(storage(), written_);
    if (transaction_) transaction_->abandon(is_alone());
  }

  const Communicator comm_;
  Rounds rounds_;
  std::optional<Location> location_;        // set when this rank has its request
  std::optional<Transaction> transaction_;  // on the coordinator
  std::optional<Value> compared_;           // the common state that is compared
  std::vector<PlanMessage> messages_;       // coordinator: by rank
  ReplicaNames replica_names_;              // coordinator: additional names for the index
  std::vector<int> others_;                 // coordinator: ranks whose common state is not rank 0's
  std::vector<DifferingContent> differing_;  // coordinator: what else the ranks hold differently
  std::vector<ContestedChunk> contested_;    // coordinator: what must be compared for that
  std::string save_id_;                      // coordinator
  std::vector<Bytes> orders_;                // coordinator: by rank, until they are sent
  std::optional<uint64_t> structure_;        // of this rank's plan, if a session keeps plans
  std::optional<CachedPlan> cached_;         // for structure_, unless the plans are exchanged
  bool as_before_ = false;                   // coordinator: all ranks use their cached plans
  RankReport report_;                        // moved from when the coordinator merges
  std::string staging_name_;                 // the directory of a staged save; "": none
  std::shared_ptr<Storage> staging_;         // that directory
  SaveResult result_;
  std::vector<std::string> written_;  // data files of this rank
};

}  // namespace

std::unique_ptr<Coordination> coordinate_by_rounds(const Communicator& comm,
                                                   const std::string& place, Deadline deadline,
                                                   std::shared_ptr<SessionParts> session) {
  return std::make_unique<CoordinationByRounds>(comm, place, deadline, std::move(session));
}

}  // namespace engine

SaveResult save(const StateDict& state, const Location& location, const SaveOptions& options) {
  try {
    return engine::save_in_a_row(
        engine::coordinate(location, options, engine::deadline_of(options)),
        [&] { return engine::Brought{&state, &location, &options}; });
  } catch (...) {
    rethrow_cause();
  }
}

SaveResult save(const std::function<SaveRequest()>& prepare, const std::string& place,
                const Communicator& comm, Deadline deadline) {
  try {
    return engine::save_in_a_row(engine::coordinate_by_rounds(comm, place, deadline),
                                 engine::bring_request(prepare));
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
