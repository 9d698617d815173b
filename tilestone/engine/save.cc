#include "tilestone/engine/save.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/log.h"
#include "tilestone/engine/commit/commit_internal.h"
#include "tilestone/engine/common_state_internal.h"
#include "tilestone/engine/coordination_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/orders_internal.h"
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
//  - kCompare: the common states differ. The named rank and rank 0 must send theirs, so that the
//    difference can be reported.
//  - kSendPlans: the ranks that have sent no plan must send it, because another rank's plan has
//    changed or because the common objects differ.
enum class Answer : uint8_t { kOrders, kCompare, kSendPlans };

Bytes ask_to_compare(int other_rank) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(Answer::kCompare));
  writer.u64(static_cast<uint64_t>(other_rank));
  return std::move(writer).take();
}

// `staging`: the name of the directory beside the location into which a staged save writes; "": the
// save is not staged.
Bytes answer_of(const std::string& staging, ByteView orders) {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(Answer::kOrders));
  writer.string(staging);
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
                       std::shared_ptr<SessionParts> session, const std::string& call = "save")
      : Coordination(deadline, std::move(session)),
        comm_(std::move(comm)),
        rounds_(comm_, call, place, deadline) {
    share_.rank = comm_.rank();
    share_.world_size = comm_.size();
  }

  void plan(const Bring& bring) override {
    try {
      agree(bring);
    } catch (...) {
      if (commit_) commit_->abandon(is_alone());
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
            commit_->publish(coordinator_deadline().without_interrupt());
            return std::vector<Bytes>();
          },
          [&](const Error& lost) { return find_published(lost); });
    } catch (...) {
      // Only the coordinator knows whether publishing was tried.
      if (commit_ && !tried) discard();
      throw;
    }
    if (commit_) commit_->clean();
    return result_;
  }

  // The other ranks can't publish: this rank has not taken part in the last round.
  void give_up(const Error& why) noexcept override {
    rounds_.leave(why);
    discard();
  }

  // Called instead of all steps: what the copies would cost, by rank.
  std::vector<CopyCost> cost_of_copies(const Bring& bring) {
    const auto answer = rounds_.run(
        "planning", [&](Deadline) { return first_message(bring); },
        [&](std::vector<Bytes> messages) {
          take_messages(messages);
          return make_orders("");
        });
    take_orders(Orders::decode(answer));
    const auto send_cost = [&](Deadline) {
      ByteWriter writer;
      writer.u64(result_.copies);
      writer.u64(result_.copy_bytes);
      return std::move(writer).take();
    };
    const Bytes costs =
        rounds_.run_last("counting copies", send_cost, [](std::vector<Bytes> of_ranks) {
          ByteWriter writer;
          for (const Bytes& cost : of_ranks) writer.raw(cost);
          return std::vector<Bytes>(of_ranks.size(), std::move(writer).take());
        });
    ByteReader reader(costs, "costs of copies");
    std::vector<CopyCost> by_rank;
    while (reader.remaining() > 0) {
      CopyCost& cost = by_rank.emplace_back();
      cost.copies = reader.u64();
      cost.bytes = reader.u64();
    }
    return by_rank;
  }

 private:
  bool is_alone() const { return comm_.size() == 1; }
  bool by_rule() const { return options().agreement == SaveOptions::Agreement::kRule; }
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
    if (is(answer, Answer::kSendPlans)) answer = send_plans(answer);
    result_.common_differs = is(answer, Answer::kCompare);
    if (result_.common_differs) answer = compare_states(answer);
    ByteReader reader(answer, "orders of a save");
    reader.u8();
    staging_name_ = reader.string();
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
    const bool same = all_as_before(messages_);
    as_before_ = same && same_contents(messages_);
    objects_differ_ = same && !as_before_;
    return as_before_ ||
           std::all_of(messages_.begin(), messages_.end(),
                       [](const PlanMessage& message) { return message.made_in.empty(); });
  }

  Bytes ask_for_plans() const {
    ByteWriter writer;
    writer.u8(static_cast<uint8_t>(Answer::kSendPlans));
    writer.u8(objects_differ_ ? 1 : 0);
    return std::move(writer).take();
  }

  // Sends the plan if this rank has not sent it yet.
  Bytes send_plans(const Bytes& asked) {
    objects_differ_ = asked.at(1) != std::byte{0};
    const bool unsent = cached_.has_value();
    cached_.reset();
    return rounds_.run(
        "planning", [&](Deadline) { return unsent ? encoded_plan() : Bytes(); },
        [&](std::vector<Bytes> plans) {
          for (size_t rank = 0; rank < plans.size(); ++rank) {
            if (!plans[rank].empty()) messages_[rank].plan = std::move(plans[rank]);
          }
          return consider_plans();
        });
  }

  // Runs on the coordinator.
  std::vector<Bytes> consider_plans() {
    if (options().validate_access && !as_before_) validate();
    others_ = differing_ranks(messages_);
    if (others_.empty()) return begin();
    return std::vector<Bytes>(messages_.size(), ask_to_compare(others_.front()));
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
    } else if (structure_) {
      session_->plans.put({*structure_, orders.save_id, orders.assignment, orders.grids,
                           objects_differ_ || objects_differed_});
      session_->count({0, 1, 0, 0});
    }
    share_.save_id = orders.save_id;
    share_.report_held = by_rule();
    if (by_rule()) {
      assign_empty_chunks(share_, orders.empties);
    } else {
      share_.assignment = std::move(orders.assignment);
    }
    const CopyCost cost = settle_copies(share_);
    result_.copies = cost.copies;
    result_.copy_bytes = cost.bytes;
    if (share_.format->needs_grid()) take_grids(share_, orders.grids);
  }

  // Rank 0 and the named rank send their common states, and the coordinator reports how they
  // differ.
  Bytes compare_states(ByteView asked) {
    ByteReader reader(asked, "question of the coordinator");
    reader.u8();
    const uint64_t other = reader.u64();
    const auto send_parts = [&](Deadline) {
      const auto rank = static_cast<uint64_t>(comm_.rank());
      return rank == 0 || rank == other ? encode_parts(*compared_) : Bytes();
    };
    return rounds_.run(
        "comparing the common state", send_parts, [&](const std::vector<Bytes>& parts) {
          tell_of_other_state(parts.front(), parts.at(other), others_, options().common_differs);
          return begin();
        });
  }

  // Runs on the coordinator after all checks: plans, and begins the save at the location.
  std::vector<Bytes> begin() {
    const std::string save_id = random_save_id();
    std::vector<Bytes> answers = make_orders(save_id);
    messages_.clear();
    commit_.emplace(location_->shared(), share_.format, share_.dialect, save_id,
                    options().overwrite);
    commit_->begin(coordinator_deadline());
    for (Bytes& answer : answers) answer = answer_of(commit_->staging(), answer);
    return answers;
  }

  std::vector<Bytes> make_orders(const std::string& save_id) {
    if (as_before_) return orders_as_before(messages_.size(), save_id);
    if (by_rule()) return orders_by_rule(messages_, save_id);
    if (is_alone()) return orders_for_one(share_.local, save_id, *share_.format);
    return orders_by_exchange(messages_, save_id, *share_.format, options().common_differs);
  }

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
    share_.items = items_of(*brought.state, share_);
    check_items(share_, location_->storage());
    check_agreement();
    std::vector<int> group = replicate_group_of(share_);
    share_.local = make_local_plan(share_.items);
    if (!group.empty()) note_contents_of_copied(share_);
    look_for_plan();
    PlanMessage message;
    message.replicas = replicas_to_name(share_);
    if (!by_rule()) message.group = std::move(group);
    if (compares()) message.common = hash_of_common(brought);
    if (compares() && !share_.items.common && !by_rule()) note_contents(share_);
    if (by_rule()) {
      message.empties = keys_without_elements(share_.local);
      share_.assignment = plan_by_rule(session_.get(), share_);
    }
    if (cached_) {
      message.made_in = cached_->made_in;
      if (compares() && !share_.items.common) message.contents = contents_of(share_.local);
    } else if (is_exchanged() || options().validate_access) {
      message.plan = encoded_plan();
    }
    return message;
  }

  bool is_exchanged() const { return !by_rule() && !is_alone(); }

  // Looks for the plan of an earlier save of the session in which this rank had the same structure.
  void look_for_plan() {
    if (session_ == nullptr || !is_exchanged()) return;
    structure_ = structure_of(share_, SaveOptions::Agreement::kExchange);
    const CachedPlan* const found = session_->plans.find(*structure_);
    if (found == nullptr) return;
    objects_differed_ = found->objects_differ;
    if (!objects_differed_ || !compares()) cached_ = *found;
  }

  Bytes encoded_plan() const {
    Bytes plan = share_.local.encode();
    if (session_ != nullptr) session_->count({0, 0, 0, plan.size()});
    return plan;
  }

  void check_agreement() const {
    if (!by_rule()) return;
    const std::string hint = "save with agreement = \"exchange\"";
    if (share_.format->needs_grid()) {
      throw Error(ErrorCode::kUnsupported,
                  "the format " + std::string(share_.format->name()) +
                      " stores regular grids, for which the ranks can't plan by rule")
          .with_hint(hint);
    }
    if (options().common_differs == SaveOptions::Differing::kError && !share_.items.common) {
      throw Error(
          ErrorCode::kUnsupported,
          "with the dialect " + std::string(share_.dialect->name()) +
              " the ranks can't compare common values by rule (common_differs is \"error\")")
          .with_hint(hint);
    }
  }

  // True if the ranks compare what should be equal on all of them.
  bool compares() const {
    return !is_alone() && options().common_differs != SaveOptions::Differing::kIgnore;
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
    commit_->prepare(
        {.save = {.reports = std::move(reports),
                  .encoded = payloads,
                  .copies = copy_policy(),
                  .attributes = options().attributes,
                  .of_dialect = share_.dialect->encode_index(share_.items, *share_.format),
                  .replicas = std::move(replica_names_)},
         .threads = options().threads},
        coordinator_deadline());
  }

  CopyPolicy copy_policy() const {
    const bool copies = options().replicate == SaveOptions::Replicate::kLocal;
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
    if (commit_) commit_->abandon(is_alone());
  }

  const Communicator comm_;
  Rounds rounds_;
  std::optional<Location> location_;   // set when this rank has its request
  std::optional<Commit> commit_;       // on the coordinator
  std::optional<Value> compared_;      // the common state that is compared
  std::vector<PlanMessage> messages_;  // coordinator: by rank
  ReplicaNames replica_names_;         // coordinator: additional names for the index
  std::vector<int> others_;            // coordinator: ranks whose common state is not rank 0's
  std::optional<uint64_t> structure_;  // of this rank's plan, if a session keeps plans
  std::optional<CachedPlan> cached_;   // for structure_, unless the plans are exchanged
  bool as_before_ = false;             // coordinator: all ranks use their cached plans
  bool objects_differ_ = false;        // common objects differ in this save: plans are sent
  bool objects_differed_ = false;      // the same in an earlier save of this structure
  RankReport report_;                  // moved from when the coordinator merges
  std::string staging_name_;           // the directory of a staged save; "": none
  std::shared_ptr<Storage> staging_;   // that directory
  SaveResult result_;
  std::vector<std::string> written_;  // data files of this rank
};

std::vector<CopyCost> copies_by_rounds(const Communicator& comm, const std::string& place,
                                       Deadline deadline, const Bring& bring) {
  return CoordinationByRounds(comm, place, deadline, nullptr, "plan_copies").cost_of_copies(bring);
}

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

std::vector<CopyCost> plan_copies(const StateDict& state, const Location& location,
                                  const SaveOptions& options) {
  try {
    const Deadline deadline = engine::deadline_of(options);
    const auto bring = [&] { return engine::Brought{&state, &location, &options}; };
    if (options.by_files) return {engine::copies_by_files(location, options, deadline, bring)};
    return engine::copies_by_rounds(options.comm, location.place(), deadline, bring);
  } catch (...) {
    rethrow_cause();
  }
}

std::vector<CopyCost> plan_copies(const std::function<SaveRequest()>& prepare,
                                  const std::string& place, const Communicator& comm,
                                  Deadline deadline) {
  try {
    return engine::copies_by_rounds(comm, place, deadline, engine::bring_request(prepare));
  } catch (...) {
    rethrow_cause();
  }
}

}  // namespace tilestone
