#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/agree.h"
#include "tilestone/engine/fast_tier/host_copies_internal.h"
#include "tilestone/engine/fast_tier/tier_internal.h"
#include "tilestone/engine/save/on_hosts_internal.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/storage/posix_storage.h"

namespace tilestone::engine {
namespace {

constexpr std::chrono::seconds kMarkerTime{60};

// A save to the hosts.
class TierStep final : public HostStep {
 public:
  TierStep(std::shared_ptr<Tier> tier, uint64_t step, bool drains,
           std::shared_ptr<Pending::State> drained)
      : HostStep(step, drains), tier_(std::move(tier)), drained_(std::move(drained)) {}
  ~TierStep() override {  // unless it has ended: the save has failed in its call
    if (drained_ == nullptr || !drained_->belongs_here()) return;
    if (!begun_.empty()) tier_->folder().root()->tidy(begun_);
    drained_->end(std::make_exception_ptr(
        Error(ErrorCode::kInterrupted, "the step was not saved to the hosts")));
  }

  std::shared_ptr<Storage> storage(const std::string& save_id) override {
    begun_ = folder_of(save_id);
    return tier_->folder().at(begun_);
  }
  void meet(const std::function<void(const Communicator&)>& work) override {
    tier_->meets().run([&] { work(tier_->meeting()); });
  }
  bool is_first_of_host(int rank) const override { return tier_->hosts().is_first(rank); }
  void keep(const KeptIndex& index, Deadline deadline) override {
    tier_->folder().keep(folder_of(index.about.save_id), index, deadline);
  }
  void kept(const std::string& save_id) override {
    const auto drained = std::exchange(drained_, nullptr);
    tier_->kept(step(), save_id, drains() ? drained : nullptr);
    if (!drains()) drained->end(nullptr);
  }
  void dropped(const std::string& save_id) noexcept override {
    if (is_first_of_host(tier_->meeting().rank())) tier_->folder().remove(folder_of(save_id));
  }
  void saved_straight(const Error& why) override {
    tier_->saved_straight(step(), why);
    std::exchange(drained_, nullptr)->end(nullptr);
  }
  void failed(const Error& error, bool full) noexcept override {
    if (full) tier_->failed_full();
    if (drained_ != nullptr) drained_->end(std::make_exception_ptr(error));
  }

 private:
  std::string folder_of(const std::string& save_id) const {
    return HostFolder::folder_of(step(), save_id);
  }
  const std::shared_ptr<Tier> tier_;
  std::string begun_;                        // the folder
  std::shared_ptr<Pending::State> drained_;  // null: it is over to the tier
};

}  // namespace

Tier::Tier(ManagedRun& run, FastOptions options, Communicator meeting, Communicator draining,
           Communicator copying, const Deadline& deadline)
    : run_(run),
      options_(std::move(options)),
      folder_(posix_storage(options_.path)),
      meeting_(std::move(meeting)),
      draining_(std::move(draining)),
      copying_(std::move(copying)),
      drains_(run.directory(), folder_, options_,
              [&run](uint64_t step) { run.prune_after(step); }) {
  const auto check = [&] {
    const Location& directory = run_.directory().location();
    if (Location(options_.path).resolved_identity() != directory.resolved_identity()) return;
    throw Error(ErrorCode::kInvalidArgument,
                "the fast tier " + options_.path + " is the run's directory itself")
        .with_hint("give the hosts a directory of their own");
  };
  hosts_ = meet_hosts(meeting_, folder_, check, deadline);
  run_.note_ordinal(hosts_.ordinal);
  if (options_.copies) targets_ = copy_targets(hosts_.first_of, options_.domains);
}

void Tier::refuse_in_child() const {
  if (!is_of_parent()) return;
  throw Error(ErrorCode::kUnsupported,
              "the fast tier belongs to the process that this one was forked from")
      .with_hint("go on with the manager in the parent, or make another one here");
}

Pending Tier::begin(uint64_t step, bool forced, RunStep& begun) {
  refuse_in_child();
  const bool drains = forced || step % options_.drain_every == 0;
  const std::string what =
      fmt::format("copying step {} to {}", step, run_.directory().location().describe());
  const auto drained = std::make_shared<Pending::State>(what, Deadline::never());
  begun.hosts = std::make_shared<TierStep>(shared_from_this(), step, drains, drained);
  if (options_.reuse) begun.reuse = to_reuse();
  const std::string run_id = lineage_of(begun.attributes).run;
  if (meeting_.is_coordinator() && !run_id.empty()) {
    const std::lock_guard lock(mutex_);
    if (run_id != marked_ && drains_in_.is_idle()) {
      drains_in_.post([this, run_id] { mark(run_id); });
    }
  }
  return Pending(drained);
}

// A disk that fails is said by the writing, in a round: here the others would wait for this rank.
std::shared_ptr<const Location> Tier::to_reuse() {
  try {
    const auto before = known(std::nullopt);
    return before ? std::make_shared<const Location>(folder_.at(before->folder)) : nullptr;
  } catch (const Error& error) {
    log(LogLevel::kWarning, fmt::format("nothing on the host is reused: {}", error.what()));
    return nullptr;
  }
}

// The newest step that this process knows, or the newest one of a number, as this host has it.
std::optional<HeldStep> Tier::known(std::optional<uint64_t> step) {
  std::string save_id;
  {
    const std::lock_guard lock(mutex_);
    for (const StepId& each : known_) {
      if (each.step == step.value_or(each.step)) save_id = each.save_id;  // the last counts
    }
  }
  return save_id.empty() ? std::nullopt : folder_.find(save_id);
}

// Rank 0 says whether its host has the step.
std::string Tier::path_of(const Communicator& comm, uint64_t step, const Deadline& deadline) {
  const auto decide = [&](int, const std::vector<Bytes>&) {
    const auto held = known(step);
    return Decision{to_bytes(held ? folder_.at(held->folder)->describe() : ""), true};
  };
  const auto say = [](int, const Bytes&) { return Bytes(); };
  return std::string(as_text(agree(comm, "look for a step on the hosts", deadline, say, decide)));
}

std::optional<std::map<std::string, double>> Tier::undrained(uint64_t step, bool or_draining) {
  const std::vector<uint64_t> waiting = drains_.waiting();
  const bool drains = std::ranges::find(waiting, step) != waiting.end();
  const auto held = drains && !or_draining ? std::nullopt : known(step);
  return held ? std::optional(metrics_of(held->about.attributes)) : std::nullopt;
}

// So that the run's steps on the hosts count after a restart even before one is drained. A run's
// directory that hangs does not stop the save. What fails is tried again by the next save.
void Tier::mark(const std::string& run_id) {
  {
    const std::lock_guard lock(mutex_);
    if (run_id == marked_) return;
  }
  try {
    const std::string name = kFastMarker + run_id;
    run_.directory().location().shared()->put(name, to_bytes(run_id), Condition::always(),
                                              name + ".tmp", Deadline::after(kMarkerTime));
  } catch (const Error& error) {
    return log_once(
        LogLevel::kWarning,
        fmt::format("until a step is in the run's directory, which can't be written now, a "
                    "restart does not find the steps on the hosts: {}",
                    error.what()));
  }
  const std::lock_guard lock(mutex_);
  marked_ = run_id;
}

void Tier::kept(uint64_t step, const std::string& save_id, std::shared_ptr<Pending::State> drains) {
  {
    const std::lock_guard lock(mutex_);
    // An earlier save of the same step goes first.
    std::ranges::stable_partition(known_, [&](const StepId& each) { return each.step == step; });
    known_.push_back({step, save_id});
  }
  if (options_.copies) copy(step, save_id);
  if (drains != nullptr) drain(step, save_id, std::move(drains));
  prune();
}

void Tier::copy(uint64_t step, const std::string& save_id) {
  std::vector<std::string> needed = {save_id};
  {
    const std::lock_guard lock(mutex_);
    if (options_.reuse && known_.size() > 1) {  // the copy links what the step before has
      needed.push_back(known_[known_.size() - 2].save_id);
    }
    in_copy_.insert(needed.begin(), needed.end());
  }
  copies_in_.post([this, step, save_id, needed] {
    try {
      copy_from_hosts(copying_, folder_, step, save_id, hosts_.first_of, targets_,
                      options_.patience, interrupt_);
    } catch (...) {
      log(LogLevel::kWarning,
          fmt::format("step {} has no copies on other hosts: {}", step, current_error().what()));
    }
    {
      const std::lock_guard lock(mutex_);
      for (const std::string& each : needed) in_copy_.erase(in_copy_.find(each));
    }
    prune_again();
  });
}

void Tier::drain(uint64_t step, const std::string& save_id, std::shared_ptr<Pending::State> ended) {
  drains_.add(step, save_id, std::move(ended));
  drains_in_.post([this] {
    drains_.work(draining_, is_first());
    prune_again();
  });
}

void Tier::leave(RunStep& begun, const std::string& why) {
  say_full(begun.hosts->step(), why);
  begun.hosts = nullptr;
  begun.reuse = nullptr;  // it is on the host
}

void Tier::saved_straight(uint64_t step, const Error& why) {
  say_full(step, why.what());
  run_.prune_after(step);
}

void Tier::say_full(uint64_t step, const std::string& why) {
  if (!meeting_.is_coordinator() || has_said_full_.exchange(true)) return;
  log(LogLevel::kWarning,
      fmt::format("the fast tier is full, so step {} is saved straight to {}, as are later ones "
                  "while that lasts: {}",
                  step, run_.directory().location().describe(), why));
}

// All ranks decide alike, sooner or later: copies and drains end at other times on each. The first
// one of each host removes.
void Tier::prune() {
  std::vector<StepId> gone;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i + options_.keep < known_.size();) {
      if (drains_.is_pinned(known_[i].save_id) || in_copy_.contains(known_[i].save_id)) {
        ++i;
        continue;
      }
      gone.push_back(known_[i]);
      known_.erase(known_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  for (const StepId& each : gone) {
    drains_.drop(each.save_id,
                 Error(ErrorCode::kIo,
                       fmt::format("step {} is removed from the hosts before it was copied to {}: "
                                   "newer steps are whole, and no more are kept",
                                   each.step, run_.directory().location().describe())));
    if (is_first()) folder_.remove(HostFolder::folder_of(each.step, each.save_id));
  }
}

// What had to stay until now. Not beside a restore, which prunes at its end. After end(), what
// waits stays for the next start.
void Tier::prune_again() {
  const std::shared_lock no_restore(restoring_, std::try_to_lock);
  if (no_restore && !is_over_) prune();
}

void Tier::wait(const Deadline& deadline) {
  constexpr std::chrono::milliseconds kLook{20};
  if (is_of_parent()) return;
  const auto until = [&](const auto& holds) {
    while (!holds() && !deadline.expired()) pause(kLook, deadline);
  };
  until([&] { return meets_.is_idle(); });
  until([&] { return copies_in_.is_idle(); });
  until([&] { return drains_in_.is_idle() || drains_.is_stalled(); });
}

void Tier::end() {
  if (is_of_parent() || is_over_.exchange(true)) return;
  meets_.end();
  const std::vector<uint64_t> waiting = drains_.waiting();
  drains_.stop();
  interrupt_->request(std::make_exception_ptr(
      Error(ErrorCode::kInterrupted, "the manager of the run was closed before it was copied")));
  drains_in_.end();
  copies_in_.end();
  if (!waiting.empty() && meeting_.is_coordinator()) {
    log(LogLevel::kWarning,
        fmt::format("steps that {} lacks stay on the hosts, and are copied after the next start of "
                    "the run: the first is {}, the last {}",
                    run_.directory().location().describe(), waiting.front(), waiting.back()));
  }
  drains_.leave();
  hosts_.claim.reset();
}

}  // namespace tilestone::engine
