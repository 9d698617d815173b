// One rank's end of a fast tier: saving (tier.cc) and restoring (restoring.cc).
//
// A fast tier is each host's own directory, to which a run's steps are saved first. Copying them to
// the run's directory (draining) follows in the background. A step on the hosts is whole once every
// rank's files and on each host the step's index are durable; ARCHITECTURE.md names the files.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tilestone/engine/fast_tier/drains_internal.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/fast_tier/met_hosts_internal.h"
#include "tilestone/engine/run/worker_internal.h"
#include "tilestone/engine/save/on_hosts_internal.h"

namespace tilestone::engine {

// All ranks make it, and call begin() and restore(), together. Used by one thread at a time, except
// what saves call that are under way, which share it.
class Tier : public std::enable_shared_from_this<Tier> {
 public:
  // `meeting`, `draining`, `copying`: communicators of the run's ranks that nothing else uses,
  // because threads of the tier do; the last one is used with copies only. `run` has
  // RunOptions::on_hosts and must outlive this object. Every rank throws Error(kInvalidArgument)
  // for copies that can't go anywhere, kAlreadyExists if another process uses a host's directory,
  // and what its file system throws.
  Tier(ManagedRun& run, FastOptions options, Communicator meeting, Communicator draining,
       Communicator copying, const Deadline& deadline);
  ~Tier() { end(); }

  // ---- Saving
  // Before a save of the step: `begun`, of ManagedRun::save(), then saves to the hosts.
  // `forced`: it is drained whatever its number. Returns the end of its draining, or if it stays on
  // the hosts, of the save.
  Pending begin(uint64_t step, bool forced, RunStep& begun);
  // The step is whole. Every rank. `drains`: null if it stays on the hosts.
  void kept(uint64_t step, const std::string& save_id, std::shared_ptr<Pending::State> drains);
  // Instead, every rank: the run's directory has it.
  void saved_straight(uint64_t step, const Error& why);
  // Instead: the save has failed, because a host's disk is full.
  void failed_full() { was_full_ = true; }
  // Whether a save has failed, because a host's disk was full after its call, since the last
  // went_straight(). Alike on all ranks, unless one has lost the others.
  bool is_full() const { return was_full_; }
  // What was begun is saved straight to the run's directory instead, which is said once with `why`.
  void leave(RunStep& begun, const std::string& why);
  void went_straight() { was_full_ = false; }
  // Every rank calls: the folder of a step of this run on rank 0's host, where rank 0 reads its
  // index; "" on all ranks: that host has none.
  std::string path_of(const Communicator& comm, uint64_t step, const Deadline& deadline);

  // The metrics of a step that this host keeps; nullopt: it has none, or without `or_draining` the
  // step is being drained.
  std::optional<std::map<std::string, double>> undrained(uint64_t step, bool or_draining);

  // ---- Restoring
  // ManagedRun::restore() with the steps on the hosts. `load`: if the step is read from the hosts,
  // `url` is its location, as long as the call lasts; else "". Rank 0 logs which steps there are.
  // Undrained steps of the run's line, from before a restart, are drained from now on.
  using Load =
      std::function<void(uint64_t step, const std::string& folder, const std::string& url)>;
  std::optional<uint64_t> restore(const Communicator& comm, std::optional<uint64_t> step,
                                  bool fallback, const ManagedRun::Limit& limit, const Load& load);

  // Until nothing waits to be drained, or a try has failed: then the steps wait on the hosts for
  // the next start of the run, which a warning says. Throws the reason of the deadline's interrupt.
  void wait(const Deadline& deadline);
  // Ends the threads; a drain under way ends too. From then on nothing else works.
  void end();

  const HostFolder& folder() const { return folder_; }
  const MetHosts& hosts() const { return hosts_; }
  const Communicator& meeting() const { return meeting_; }
  Worker& meets() { return meets_; }

 private:
  // What rank 0 chooses for a restore.
  struct Choice {
    SaidStep step;                 // without a save id: the run's directory has the newest
    Bytes record;                  // its KeptStep
    std::string stands_there;      // its folder in the run's directory; "": that lacks it
    std::vector<SaidStep> of_run;  // whole steps of the run, oldest first

    bool is_on_hosts() const { return !step.save_id.empty(); }
  };

  std::optional<HeldStep> known(std::optional<uint64_t> step);
  void drain(uint64_t step, const std::string& save_id, std::shared_ptr<Pending::State> ended);
  void copy(uint64_t step, const std::string& save_id);
  std::shared_ptr<const Location> to_reuse();
  void prune();
  void prune_again();
  void mark(const std::string& run_id);
  void refuse_in_child() const;
  void say_full(uint64_t step, const std::string& why);
  bool is_first() const { return hosts_.is_first(meeting_.rank()); }
  bool is_of_parent() const { return process_ != ::getpid(); }  // this is a forked child

  Bytes say_held();
  // `damaged`: save ids of steps on the hosts, and names of steps in the run's directory.
  Choice choose(std::vector<SaidStep> said, std::optional<uint64_t> step, bool fallback,
                const std::set<std::string>& damaged);
  void say_choice(const SaidStep* hosts, const StepInfo* there, bool takes_hosts) const;
  void say_others(size_t count);
  void say_lacking(const SaidStep& step) const;
  Choice agreed(const Communicator& comm, std::optional<uint64_t> step, bool fallback,
                const std::set<std::string>& damaged, const Deadline& deadline);
  void load(const Choice& choice, const Deadline& deadline, const Load& given);
  void keep_index(const std::string& folder, Storage& step, const KeptStep& about,
                  const Deadline& deadline) const;
  std::optional<uint64_t> load_there(const Communicator& comm, std::optional<uint64_t> step,
                                     bool fallback, const ManagedRun::Limit& limit,
                                     const Load& given, std::set<std::string>& damaged,
                                     Choice& choice);
  void adopt(const Choice& choice, std::optional<uint64_t> loaded_there);

  const pid_t process_ = ::getpid();
  ManagedRun& run_;
  const FastOptions options_;
  const HostFolder folder_;
  const Communicator meeting_, draining_, copying_;
  MetHosts hosts_;
  std::vector<int> targets_;            // of copies, see copy_targets()
  std::shared_mutex restoring_;         // held by a restore, whose step must stay
  std::mutex mutex_;                    // guards known_, in_copy_ and marked_
  std::vector<StepId> known_;           // on the hosts, oldest first
  std::multiset<std::string> in_copy_;  // whose files must stay
  const std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();  // of copies
  std::string marked_;  // on rank 0: the run whose marker stands
  std::atomic<bool> was_full_ = false;
  std::atomic<bool> is_over_ = false;
  bool has_said_others_ = false;
  std::atomic<bool> has_said_full_ = false;
  Drains drains_;
  Worker meets_, drains_in_, copies_in_;  // last: their threads use the others
};

}  // namespace tilestone::engine
