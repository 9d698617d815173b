// Each rank has a thread for this, with a communicator that nothing else uses.
//
//  1. Choose. Each rank says which waiting steps its host has. Rank 0 chooses the oldest of which
//     every file is there, and says who copies which file.
//  2. Begin. Rank 0 begins the ordinary transaction (commit/transaction.cc) at the step's folder in
//     the run's directory, with the save id of the step. If the step stands there already, because
//     a process died after it had committed, the drain is over.
//  3. Copy. The first rank of each host copies its files, compares them with their checksums on the
//     way, links those that the step drained before has (SaveOptions::reuse), which it does not
//     read, and makes them durable. Every two seconds the ranks meet: one that is lost is missed.
//  4. Commit. Rank 0 publishes the index that the hosts keep, byte for byte. The run's directory
//     shows nothing of the step before.
//
// A crash before 4 leaves what a transaction leaves, and after a restart the step is drained from
// the beginning. A rank that has missed the end of 4 says that the step still waits, and rank 0
// then ends it once more for all. If a try fails on any rank, all have failed, and try again later,
// each time after a longer wait, unless no try can succeed: then the step stays on the hosts.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/pause.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/commit/sibling_internal.h"
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/fast_tier/copying_internal.h"
#include "tilestone/engine/fast_tier/drains_internal.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {

// Rank 0's part of one drain. `transaction`: null if the step stands there.
struct DrainCommit {
  std::optional<Transaction> transaction = std::nullopt;
  KeptIndex index = {};
  Manifest manifest = {};
};

namespace {

constexpr double kLongestWait = 60;  // seconds until a failed drain is tried again
constexpr int kDrainThreads = 1;
constexpr std::chrono::seconds kTurn{2};  // in which ranks that copy hear of one another

// Whether no further try can succeed.
bool is_final(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kIo:
    case ErrorCode::kNotFound:
    case ErrorCode::kTimeout:
    case ErrorCode::kRankFailed:
    case ErrorCode::kInterrupted:  // another rank is closed: it does so after a failure only
      return false;
    case ErrorCode::kMismatch:  // a rank has missed the end of a try
      return error.reason() != Reason::kDifferentCalls;
    case ErrorCode::kAlreadyExists:
      return error.reason() != Reason::kUnderWay;
    default:
      return true;
  }
}

bool is_over(const Bytes& said) { return said.at(0) != std::byte{0}; }

// Whether the step replaces what stands there: only what is older, because after a restart on other
// hosts the run may have saved the step once more. A step that continues one of its own number is
// saved once more with further metrics, and replaces an earlier save of it.
bool may_replace(const KeptStep& about, const RunDirectory& run) {
  const Lineage lineage = lineage_of(about.attributes);
  const bool is_again = lineage.parent && lineage.parent->step == about.step;
  if (!about.replaces && !is_again) return false;
  const StepInfo standing = run.look({.step = about.step, .name = run.names().name_of(about.step)});
  if (!about.replaces && standing.lineage.run != lineage.run) return false;
  if (standing.state != StepState::kDurable) return true;
  if (standing.lineage.ordinal >= lineage.ordinal) return false;
  if (!about.replaces && standing.save_id != lineage.parent->save_id) {
    log(LogLevel::kWarning,
        fmt::format("step {} in {} is replaced: the save {} by the later save "
                    "{}, which does not continue it",
                    about.step, run.location().describe(), standing.save_id, about.save_id));
  }
  return true;
}

// Begins the transaction, and returns "/" and the name of the sibling; "": the step stands there.
Bytes begin(DrainCommit& commit, const RunDirectory& run, const std::shared_ptr<Storage>& location,
            const Deadline& deadline) {
  const std::string& save_id = commit.index.about.save_id;
  commit.manifest = Manifest::decode(commit.index.manifest, manifest_name(save_id));
  const auto format = format_named(commit.manifest.format);
  if (holds_checkpoint_of(*location, format, save_id)) return {};
  commit.transaction.emplace(location, format, save_dialect_named(commit.manifest.dialect), save_id,
                             may_replace(commit.index.about, run));
  commit.transaction->begin(deadline);
  return to_bytes("/" + commit.transaction->sibling());
}

void prepare(DrainCommit& commit, const Deadline& deadline) {
  std::set<std::string> dialects;
  for (const auto& entry : commit.index.about.index) {
    if (entry.of_dialect) dialects.insert(entry.name);
  }
  commit.transaction->prepare_made(commit.index.made(), dialects, commit.manifest.receipts,
                                   kDrainThreads, deadline);
}

}  // namespace

Drains::Drains(RunDirectory run, HostFolder folder, const FastOptions& options,
               std::function<void(uint64_t)> drained)
    : run_(std::move(run)),
      folder_(std::move(folder)),
      rate_(options.drain_bytes_per_second),
      patience_(options.patience),
      first_wait_(options.first_wait.count()),
      drained_(std::move(drained)) {}

void Drains::add(uint64_t step, const std::string& save_id, std::shared_ptr<Pending::State> ended) {
  const std::lock_guard lock(mutex_);
  waiting_.try_emplace(save_id, Waiting{step, std::move(ended)});
}

bool Drains::is_pinned(const std::string& save_id) const {
  const std::lock_guard lock(mutex_);
  return pinned_.contains(save_id);
}

bool Drains::is_stalled() const {
  const std::lock_guard lock(mutex_);
  return is_stalled_;
}

std::vector<uint64_t> Drains::waiting() const {
  const std::lock_guard lock(mutex_);
  std::vector<uint64_t> steps;
  for (const auto& [save_id, waiting] : waiting_) steps.push_back(waiting.step);
  std::ranges::sort(steps);
  return steps;
}

void Drains::note_earlier(std::optional<uint64_t> step) {
  const std::lock_guard lock(mutex_);
  earlier_ = nullptr;
  if (step) earlier_ = std::make_shared<const Location>(run_.at(run_.names().name_of(*step)));
}

// Null: the step does not wait.
std::shared_ptr<Pending::State> Drains::take(const std::string& save_id) {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.extract(save_id);
  pinned_.erase(save_id);
  return found.empty() ? nullptr : found.mapped().ended;
}

void Drains::drop(const std::string& save_id, const Error& why) {
  const auto state = take(save_id);
  if (state == nullptr) return;
  log(LogLevel::kWarning, why.what());
  state->end(std::make_exception_ptr(why));
}

void Drains::stop() {
  interrupt_->request(std::make_exception_ptr(
      Error(ErrorCode::kInterrupted, "the manager of the run was closed before it was drained")));
}

void Drains::leave() {
  std::map<std::string, Waiting> left;
  {
    const std::lock_guard lock(mutex_);
    left.swap(waiting_);
  }
  for (const auto& [save_id, waiting] : left) {
    waiting.ended->end(std::make_exception_ptr(
        Error(ErrorCode::kInterrupted,
              fmt::format("step {} stays on the hosts, and is copied to {} after the next start of "
                          "the run: its manager was closed before",
                          waiting.step, run_.location().describe()))));
  }
}

void Drains::work(const Communicator& comm, bool is_first) {
  const Deadline deadline = Deadline::never().with_interrupt(interrupt_);
  std::set<std::string> gone;  // files, each of which is looked for elsewhere at once
  for (double wait = first_wait_;;) {
    std::optional<SaidStep> step;
    try {
      step = choose(comm, is_first);
      if (!step) return;
      drain(comm, *step);
      ended(*step);
      wait = first_wait_;
      continue;
    } catch (...) {
      const Error error = current_error();
      if (interrupt_->requested()) return;
      if (step && error.code() == ErrorCode::kNotFound && !error.file().empty() &&
          gone.insert(step->save_id + error.file()).second) {
        log(LogLevel::kWarning, fmt::format("step {}: {}", step->step, error.what()));
        continue;
      }
      if (step && is_final(error)) {
        note_stalled(false);
        drop(step->save_id, error.with_message(fmt::format(
                                "step {} is not copied to {} and stays on the hosts: {}",
                                step->step, run_.location().describe(), error.message())));
        continue;
      }
      say_failure(error, wait);
    }
    try {
      pause(std::chrono::duration<double>(wait), deadline);
    } catch (const Error&) {
      return;
    }
    wait = std::min(2 * wait, kLongestWait);
  }
}

void Drains::note_stalled(bool is_stalled) {
  const std::lock_guard lock(mutex_);
  is_stalled_ = is_stalled;
  pinned_.clear();
}

void Drains::say_failure(const Error& error, double wait) {
  note_stalled(true);
  std::string steps;
  for (const uint64_t step : waiting()) steps += fmt::format(" {}", step);
  log(LogLevel::kWarning,
      fmt::format("{}; the steps{} wait on the hosts, and are tried again in {:.0f} s: {}",
                  error.code() == ErrorCode::kRankFailed || error.code() == ErrorCode::kTimeout
                      ? "nothing can be copied now"
                      : run_.location().describe() + " can't be written now",
                  steps, wait, error.what()));
}

// What waits and this host holds. It stays until rank 0 has chosen.
Bytes Drains::say(int rank, bool is_first) {
  std::vector<HeldStep> held = folder_.list();
  const std::lock_guard lock(mutex_);
  std::erase_if(held, [&](const HeldStep& step) { return !waiting_.contains(step.about.save_id); });
  for (HeldStep& step : held) {
    pinned_.insert(step.about.save_id);
    if (!is_first) step.here.clear();
  }
  return say_steps(held, rank);
}

// Every rank says what waits for it, so all keep the same, and one that has kept a step after the
// others had drained it is answered, too. The first one of each host says, and copies, its files.
std::optional<SaidStep> Drains::choose(const Communicator& comm, bool is_first) {
  auto step = agree_on_step(
      comm, "choice of a step to drain", turn_end(), [&] { return say(comm.rank(), is_first); },
      [&](const SaidStep& each) { return each.is_whole() || each.save_id == committed_; });
  const std::lock_guard lock(mutex_);
  pinned_.clear();
  if (step) pinned_.insert(step->save_id);
  return step;
}

void Drains::copy(const SaidStep& step, int rank, StepCopy& work, const Deadline& deadline) const {
  const auto copies = [&](const std::vector<int>& holders) {
    return !holders.empty() && holders.front() == rank;
  };
  if (std::ranges::none_of(step.holders, copies)) return;
  const HeldStep own = folder_.get(step.save_id);
  std::set<std::string> names;
  for (size_t i = 0; i < step.holders.size(); ++i) {
    if (copies(step.holders[i])) names.insert(own.about.files.at(i).name);
  }
  work.from = reading_of(folder_.at(own.folder));
  work.run(folder_.manifest(own).receipts, names, deadline);
}

void Drains::drain(const Communicator& comm, const SaidStep& step) {
  const std::shared_ptr<Storage> location = run_.at(run_.names().name_of(step.step)).shared();
  DrainCommit commit;
  StepCopy work{.to = location, .bytes_per_second = rate_};
  {
    const std::lock_guard lock(mutex_);
    work.earlier = earlier_;
  }
  bool may_be_published = false;
  try {
    const Bytes answer = begin_together(comm, step, commit, location);
    const bool stands = answer.empty();
    if (answer.size() > 1)
      work.to = sibling_storage(*location, std::string(as_text(answer).substr(1)));
    if (!stands) copy_together(comm, step, commit, work);
    Rounds last(comm, "the end of a drain", step.save_id, turn_end());
    may_be_published = true;
    commit_together(last, step, commit);
    if (!stands) note_earlier(step.step);
  } catch (...) {
    const bool ended = Rounds::reached_all(current_error());
    const bool tried = commit.transaction && commit.transaction->was_tried();
    if (!may_be_published || (commit.transaction && !tried)) remove_files(*work.to, work.made);
    if (commit.transaction && !tried) commit.transaction->abandon(ended || comm.size() == 1);
    throw;
  }
}

// Step 2. Returns what begin() does; "" also if rank 0 has ended the drain before.
Bytes Drains::begin_together(const Communicator& comm, const SaidStep& step, DrainCommit& commit,
                             const std::shared_ptr<Storage>& location) {
  Rounds rounds(comm, "drain", step.save_id, turn_end());
  const auto keeps = [&](Deadline) {
    if (comm.rank() != step.keeper) return Bytes();
    return folder_.read(folder_.get(step.save_id)).encode();
  };
  return rounds.run("beginning", keeps, [&](const std::vector<Bytes>& payloads) {
    commit.index = KeptIndex::decode(payloads.at(static_cast<size_t>(step.keeper)));
    const bool ended = step.save_id == committed_;
    const Bytes answer = ended ? Bytes() : begin(commit, run_, location, rounds.deadline());
    return std::vector<Bytes>(payloads.size(), answer);
  });
}

// Step 3. The ranks meet meanwhile, so that one that is lost is missed.
void Drains::copy_together(const Communicator& comm, const SaidStep& step, DrainCommit& commit,
                           StepCopy& work) {
  const auto stop = std::make_shared<Interrupt>();
  stop->follow(interrupt_);
  std::future<void> copying = std::async(std::launch::async, [&] {
    copy(step, comm.rank(), work, Deadline::never().with_interrupt(stop));
  });
  const auto wait = [&](const Deadline& limit) {
    const auto time = std::min<std::chrono::nanoseconds>(kTurn, limit.remaining() / 2);
    const bool over = !copying.valid() || copying.wait_for(time) == std::future_status::ready;
    if (over && copying.valid()) copying.get();
    return Bytes{std::byte(over)};
  };
  try {
    for (bool over = false; !over;) {
      Rounds turn(comm, "copying", step.save_id, turn_end());
      over = is_over(turn.run("copying", wait, [&](const std::vector<Bytes>& said) {
        const Bytes all{std::byte(std::ranges::all_of(said, is_over))};
        if (is_over(all)) prepare(commit, turn.deadline());
        return std::vector<Bytes>(said.size(), all);
      }));
    }
  } catch (...) {
    stop->request(std::current_exception());
    if (copying.valid()) copying.wait();
    throw;
  }
}

// Step 4.
void Drains::commit_together(Rounds& last, const SaidStep& step, DrainCommit& commit) {
  last.run_last(
      "committing", [](Deadline) { return Bytes(); },
      [&](const std::vector<Bytes>&) {
        if (commit.transaction) commit.transaction->commit(last.deadline().without_interrupt());
        committed_ = step.save_id;
        return std::vector<Bytes>();
      });
  if (commit.transaction) commit.transaction->clean();
}

void Drains::ended(const SaidStep& step) {
  note_stalled(false);
  const auto state = take(step.save_id);
  drained_(step.step);
  if (state != nullptr) state->end(nullptr);
}

}  // namespace tilestone::engine
