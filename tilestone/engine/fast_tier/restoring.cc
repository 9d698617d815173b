// Restoring with a fast tier.
//
//  1. The first rank of each host says which steps its host has, and of which files. Rank 0 unites
//     this, and chooses between the newest step that is whole on the hosts and the newest durable
//     one of the run's directory, by their ordinals; of two different ones with the same ordinal,
//     saved after restarts on different hosts, that of the directory. Only steps of runs that the
//     directory knows count: by a step there, or by the marker that a run's first save to the hosts
//     leaves.
//  2. A step on the hosts is loaded as any checkpoint is, from a storage that reads this host's
//     files itself, those of other hosts through HostReads, so the layout may be another one, and
//     what no host has in the run's directory, if that has the step. If the step is
//     damaged, and the directory has it, or with `fallback`, the next one is chosen, from the hosts
//     and the directory again; so it is if one of the directory is damaged.
//  3. What is whole on the hosts, should be in the run's directory, and is newer on the run's line
//     than the newest step that the directory has of it, is drained from now on.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/or_log.h"
#include "tilestone/base/size_text.h"
#include "tilestone/engine/agree.h"
#include "tilestone/engine/fast_tier/host_reads_internal.h"
#include "tilestone/engine/fast_tier/hosts_storage_internal.h"
#include "tilestone/engine/fast_tier/tier_internal.h"
#include "tilestone/engine/run/terms_internal.h"
#include "tilestone/engine/training_run/look_internal.h"
#include "tilestone/format/data_file_name.h"

namespace tilestone::engine {
namespace {

constexpr const char* kChoice = "choice of a checkpoint";  // as ManagedRun::restore()

std::set<std::string> known_runs(const RunDirectory& run, const std::vector<StepInfo>& there) {
  std::set<std::string> runs;
  for (const StepInfo& each : there) runs.insert(each.lineage.run);
  for (const std::string& name : run.location().storage().list_files(kFastMarker)) {
    runs.insert(name.substr(std::string_view(kFastMarker).size()));
  }
  runs.erase("");
  return runs;
}

// The step that a restore from the directory takes, or, damaged and without `fallback`, fails with.
std::optional<StepInfo> newest_there(const RunDirectory& run, std::vector<StepInfo> steps,
                                     bool fallback, const std::set<std::string>& damaged) {
  std::optional<StepInfo> found;
  const auto look = [&](const StepInfo& listed) {
    return look_at(run.at(listed.name).shared(), listed);
  };
  follow(run, std::move(steps), {damaged.begin(), damaged.end()}, look, [&](const Look& seen) {
    if (seen.info.state == StepState::kDurable || (seen.error && !fallback)) found = seen.info;
    return found.has_value();
  });
  return found;
}

// The steps that the hosts say they have, once the run continues from `from`: those that its line
// has left or no host has whole come first. Which of them drain: those of the line that are newer
// than its newest step in the directory. Older ones were drained too, and may have been removed
// there, or were given up.
std::vector<SaidStep> continued(std::vector<SaidStep> said, const RunDirectory& directory,
                                const std::vector<StepInfo>& there, const StepInfo& from) {
  std::vector<StepInfo> all = there;
  for (const SaidStep& each : said) all.push_back(each.info());
  const Line line = line_of(all, from);
  const auto drained = std::ranges::find_if(line, [&](const StepInfo* each) {
    const auto same = std::ranges::find(there, each->save_id, &StepInfo::save_id);
    return same != there.end() && directory.look(*same).state == StepState::kDurable;
  });
  const uint64_t least = drained == line.end() ? 0 : (*drained)->lineage.ordinal + 1;
  std::set<std::string> on_line;
  for (const StepInfo* each : line) on_line.insert(each->save_id);
  for (SaidStep& each : said) {
    each.drains = each.drains && on_line.contains(each.save_id) && each.lineage.ordinal >= least;
  }
  std::ranges::stable_partition(said, [&](const SaidStep& each) {
    return !on_line.contains(each.save_id) || !each.is_whole();
  });
  return said;
}

// As in base/both_ways.h.
void walk_choice(auto& io, auto& choice) {
  walk_step(io, choice.step);
  both::blob(io, choice.record);
  both::text(io, choice.stands_there);
  both::each(io, choice.of_run, 6, [&](auto& each) { walk_step(io, each); });
}

}  // namespace

Bytes Tier::say_held() {
  if (!is_first()) return {};
  return say_steps(folder_.list(), meeting_.rank());
}

void Tier::say_others(size_t count) {
  if (count == 0 || std::exchange(has_said_others_, true)) return;
  log(LogLevel::kWarning,
      fmt::format("{} in the fast tier {}: of runs that {} does not know. Nothing reads or removes "
                  "them",
                  counted(count, "step"), count == 1 ? "is" : "are",
                  run_.directory().location().describe()));
}

// Says which newest steps there are, and what taking the other one would lose.
void Tier::say_choice(const SaidStep* hosts, const StepInfo* there, bool takes_hosts) const {
  const auto named = [](const auto* step) {
    return step == nullptr ? "no step" : fmt::format("step {}", step->step);
  };
  std::string loss;
  if (hosts != nullptr && there != nullptr && hosts->step != there->step &&
      takes_hosts == (hosts->step > there->step)) {
    loss = fmt::format(
        "; with the other one {} would be lost",
        counted(std::max(hosts->step, there->step) - std::min(hosts->step, there->step), "step"));
  }
  log(LogLevel::kInfo, fmt::format("the run continues from {}: the hosts have {}, {} has {}{}",
                                   takes_hosts ? "the hosts" : "its directory", named(hosts),
                                   run_.directory().location().describe(), named(there), loss));
}

// Says that a step does not count, though it would be the newest.
void Tier::say_lacking(const SaidStep& step) const {
  std::set<int> ranks;
  const auto held = folder_.find(step.save_id);
  size_t lacking = 0;
  for (size_t i = 0; i < step.holders.size(); ++i) {
    if (!step.holders[i].empty()) continue;
    ++lacking;
    if (!held || i >= held->about.files.size()) continue;
    const auto name = parse_data_file_name(held->about.files[i].name);
    if (name) ranks.insert(name->rank);
  }
  log(LogLevel::kWarning,
      fmt::format("step {} of the run is on hosts, but does not count: no host that is here has {} "
                  "of its {}{}. If a host comes late, start again with it: a save removes the step",
                  step.step, lacking, counted(step.holders.size(), "file"),
                  ranks.empty() ? "" : ", of " + ranks_text({ranks.begin(), ranks.end()})));
}

// On rank 0.
Tier::Choice Tier::choose(std::vector<SaidStep> said, std::optional<uint64_t> step, bool fallback,
                          const std::set<std::string>& damaged) {
  const RunDirectory& directory = run_.directory();
  const std::vector<StepInfo> there = directory.list_lineages();
  const std::set<std::string> runs = known_runs(directory, there);
  const size_t all_runs = said.size();
  std::erase_if(said, [&](const SaidStep& each) { return !runs.contains(each.lineage.run); });
  say_others(all_runs - said.size());

  std::vector<StepInfo> of_step = there;
  if (step) std::erase_if(of_step, [&](const StepInfo& each) { return each.step != *step; });
  const auto tip = newest_there(directory, std::move(of_step), fallback, damaged);
  const auto stands = [&](const SaidStep& each) {
    return tip && tip->save_id == each.save_id && tip->state == StepState::kDurable;
  };
  const SaidStep* newest = nullptr;
  for (const SaidStep& each : said) {
    if ((each.is_whole() || stands(each)) && !damaged.contains(each.save_id) &&
        (!step || each.step == *step)) {
      newest = &each;
    }
  }
  const bool takes_hosts =
      newest != nullptr &&
      (!tip || tip->lineage.ordinal < newest->lineage.ordinal || tip->save_id == newest->save_id);
  say_choice(newest, tip ? &*tip : nullptr, takes_hosts);
  const uint64_t chosen = takes_hosts ? newest->lineage.ordinal : tip ? tip->lineage.ordinal : 0;
  const SaidStep* lacks = nullptr;
  for (const SaidStep& each : said) {
    const bool is_newer = each.lineage.ordinal > chosen && (!step || each.step == *step);
    if (is_newer && !each.is_whole()) lacks = &each;
  }
  if (lacks != nullptr) say_lacking(*lacks);
  Choice choice;
  if (takes_hosts) choice.step = *newest;
  if (takes_hosts && stands(*newest)) choice.stands_there = tip->name;
  const StepInfo from = takes_hosts ? newest->info() : tip.value_or(StepInfo());
  choice.of_run = continued(std::move(said), directory, there, from);
  return choice;
}

Tier::Choice Tier::agreed(const Communicator& comm, std::optional<uint64_t> step, bool fallback,
                          const std::set<std::string>& damaged, const Deadline& deadline) {
  const Terms terms = {{"step", step ? std::to_string(*step) : "the newest"},
                       {"fallback", fallback ? "true" : "false"}};
  const auto choice_in = [](const Bytes& answer) {
    ByteReader in(answer, kChoice);
    Choice choice;
    walk_choice(in, choice);
    return choice;
  };
  const auto say = [&](int round, const Bytes& answer) {
    if (round == 0) return with_terms(say_held(), terms);
    const Choice choice = choice_in(answer);
    if (choice.step.keeper != comm.rank()) return Bytes();
    return folder_.get(choice.step.save_id).about.encode();
  };
  Choice choice;
  const Bytes answer = agree(comm, kChoice, deadline, say, [&](int round, std::vector<Bytes> said) {
    if (round == 0) {
      agree_on_terms(said);
      choice = choose(united_steps(said), step, fallback, damaged);
    } else {
      choice.record = std::move(said.at(static_cast<size_t>(choice.step.keeper)));
    }
    ByteWriter out;
    walk_choice(out, choice);
    return Decision{std::move(out).take(), round > 0 || !choice.is_on_hosts()};
  });
  return choice_in(answer);
}

// A replaced host gets the index back, with which a further save of the step is compared. Throws
// nothing: the others go on.
void Tier::keep_index(const std::string& folder, Storage& step, const KeptStep& about,
                      const Deadline& deadline) const {
  if (!is_first()) return;
  try {
    if (folder_.find(about.save_id)) return;
    folder_.keep(folder, HostFolder::read(step, about), deadline);
  } catch (const Error& error) {
    log(LogLevel::kWarning, fmt::format("{} is not noted on this host: {}", folder, error.what()));
  }
}

void Tier::load(const Choice& choice, const Deadline& deadline, const Load& given) {
  const SaidStep& step = choice.step;
  const std::string folder = HostFolder::folder_of(step.step, step.save_id);
  const KeptStep about = KeptStep::decode(choice.record, folder);
  const auto own = folder_.at(folder);
  const auto fetching = std::make_shared<HostReads>(reading_of(own));
  std::shared_ptr<Storage> there;
  if (!choice.stands_there.empty()) there = run_.directory().at(choice.stands_there).shared();
  const auto storage = hosts_storage(own, about, step, fetching, std::move(there));
  const StepUrl opened(step.save_id, storage);
  const bool is_far = std::ranges::any_of(hosts_.first_of, [](int first) { return first > 0; });
  if (is_far) {
    meets_.post([&] { fetching->serve(meeting_, step.save_id, [&] { return deadline; }); });
  }
  const auto end = [&] {
    fetching->end();
    meets_.wait();
  };
  try {
    given(step.step, folder, opened.url());
    keep_index(folder, *storage, about, deadline);
  } catch (...) {
    end();
    throw;
  }
  end();
}

void Tier::adopt(const Choice& choice, std::optional<uint64_t> loaded_there) {
  run_.note_ordinal(hosts_.ordinal);
  drains_.note_earlier(loaded_there);
  for (const SaidStep& each : choice.of_run) {
    run_.note_ordinal(each.lineage.ordinal);
    if (!each.drains || !each.is_whole()) continue;
    drain(each.step, each.save_id,
          std::make_shared<Pending::State>(fmt::format("copying step {}", each.step),
                                           Deadline::never()));
  }
  {
    const std::lock_guard lock(mutex_);
    known_.clear();
    for (const SaidStep& each : choice.of_run) known_.push_back({each.step, each.save_id});
  }
  if (options_.copies && choice.is_on_hosts()) copy(choice.step.step, choice.step.save_id);
  prune();
}

// From the run's directory. Before a load after one that has failed, of a step that is damaged or
// was removed, all is chosen anew: if that is on the hosts, `choice` has it on return.
std::optional<uint64_t> Tier::load_there(const Communicator& comm, std::optional<uint64_t> step,
                                         bool fallback, const ManagedRun::Limit& limit,
                                         const Load& given, std::set<std::string>& damaged,
                                         Choice& choice) {
  std::string failed;
  try {
    return run_.restore(comm, step, fallback, limit, [&](uint64_t chosen, const std::string& name) {
      if (!failed.empty()) {
        damaged.insert(failed);
        choice = agreed(comm, step, fallback, damaged, limit());
        if (choice.is_on_hosts()) {
          throw Error(ErrorCode::kInterrupted, "the hosts have a newer step");
        }
      }
      failed = name;
      given(chosen, name, "");
    });
  } catch (const Error&) {
    if (!choice.is_on_hosts()) throw;
    return std::nullopt;
  }
}

std::optional<uint64_t> Tier::restore(const Communicator& comm, std::optional<uint64_t> step,
                                      bool fallback, const ManagedRun::Limit& limit,
                                      const Load& given) {
  refuse_in_child();
  const std::unique_lock restoring(restoring_);
  std::set<std::string> damaged;
  Choice choice = agreed(comm, step, fallback, damaged, limit());
  for (;;) {
    if (!choice.is_on_hosts()) {
      const auto found = load_there(comm, step, fallback, limit, given, damaged, choice);
      if (!choice.is_on_hosts()) {
        adopt(choice, found);
        return found;
      }
    }
    try {
      load(choice, limit(), given);
    } catch (const Error& error) {
      if (!is_about_files(error) || (choice.stands_there.empty() && !fallback)) throw;
      damaged.insert(choice.step.save_id);
      if (comm.is_coordinator()) {
        log(LogLevel::kWarning,
            fmt::format("step {} on the hosts is damaged ({}); the next best one is looked for",
                        choice.step.step, error.what()));
      }
      choice = agreed(comm, step, fallback, damaged, limit());
      continue;
    }
    std::vector<StepInfo> others;
    for (const SaidStep& each : choice.of_run) others.push_back(each.info());
    run_.continue_from(choice.step.info(), std::move(others));
    adopt(choice, std::nullopt);
    return choice.step.step;
  }
}

}  // namespace tilestone::engine
