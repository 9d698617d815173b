// What the parts of a fast tier share: saving (tier.cc) and restoring (restoring.cc).
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <vector>

#include "tilestone/engine/fast_tier/drains_internal.h"
#include "tilestone/engine/fast_tier/fast_tier.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/fast_tier/hosts_storage_internal.h"
#include "tilestone/engine/fast_tier/met_hosts_internal.h"
#include "tilestone/engine/fast_tier/worker_internal.h"
#include "tilestone/engine/save/on_hosts_internal.h"

namespace tilestone::engine {

// In a run's directory, with the run's id: it has steps on hosts.
inline constexpr const char* kRunMarker = ".fast-tier-of-";

// One rank's end. Saves that are under way share it.
class Tier {
 public:
  // Error(kInvalidArgument) for options that are out of range.
  Tier(ManagedRun& run, FastOptions options, Communicator meeting, Communicator draining,
       Communicator copying);
  void meet(const Deadline& deadline);

  // ---- Saving
  Pending begin(uint64_t step, bool forced, RunStep& begun, const std::shared_ptr<Tier>& self);
  // The step is whole. Every rank. `drains`: null if it stays on the hosts.
  void kept(uint64_t step, const std::string& save_id, std::shared_ptr<Pending::State> drains);
  // Instead, every rank: the run's directory has it.
  void saved_straight(uint64_t step, const Error& why);
  // Instead: the save has failed, because a host's disk is full.
  void failed_full() { was_full_ = true; }
  bool is_full() const { return was_full_; }
  void leave(RunStep& begun, const std::string& why);
  void went_straight() { was_full_ = false; }
  std::string url_of(const Communicator& comm, uint64_t step, const Deadline& deadline);

  // ---- Restoring
  std::optional<uint64_t> restore(const Communicator& comm, std::optional<uint64_t> step,
                                  bool fallback, const ManagedRun::Limit& limit,
                                  const FastTier::Load& load);

  void wait(const Deadline& deadline);
  void end();

  const HostFolder& folder() const { return folder_; }
  const MetHosts& hosts() const { return hosts_; }
  const Communicator& meeting() const { return meeting_; }
  Worker& meets() { return meets_; }
  const Drains& drains() const { return drains_; }

 private:
  // A step on the hosts that this process knows.
  struct Known {
    uint64_t step = 0;
    std::string save_id;
  };
  // What rank 0 chooses for a restore.
  struct Choice {
    std::optional<SaidStep> step;  // on the hosts; nullopt: the run's directory has the newest
    Bytes record;                  // its KeptStep
    bool stands_there = false;     // the run's directory has it, too
    std::vector<SaidStep> of_run;  // whole steps of the run, oldest first

    Bytes encode() const;
    static Choice decode(ByteView bytes);
  };

  std::optional<HeldStep> known(std::optional<uint64_t> step);
  void drain(uint64_t step, const std::string& save_id, std::shared_ptr<Pending::State> ended);
  void copy(uint64_t step, const std::string& save_id);
  std::shared_ptr<const Location> to_reuse();
  void prune();
  void prune_again();
  void begin_mark(const std::string& run_id);
  void mark();
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
  Choice agreed(const Communicator& comm, std::optional<uint64_t> step, bool fallback,
                const std::set<std::string>& damaged, const Deadline& deadline);
  void load(const Choice& choice, const Deadline& deadline, const FastTier::Load& given);
  void keep_index(const std::string& folder, Storage& step, const KeptStep& about,
                  const Deadline& deadline) const;
  std::optional<uint64_t> load_there(const Communicator& comm, std::optional<uint64_t> step,
                                     bool fallback, const ManagedRun::Limit& limit,
                                     const FastTier::Load& given, std::set<std::string>& damaged,
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
  std::mutex mutex_;                    // guards known_, in_copy_, marked_ and unmarked_
  std::vector<Known> known_;            // oldest first
  std::multiset<std::string> in_copy_;  // whose files must stay
  const std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();  // of copies
  std::string marked_, unmarked_;  // on rank 0: the run whose marker stands, and is to be made
  std::atomic<bool> was_full_ = false;
  std::atomic<bool> is_over_ = false;
  bool has_said_others_ = false;
  std::atomic<bool> has_said_full_ = false;
  std::optional<StepUrl> opened_;  // what url_of() has returned
  Drains drains_;
  Worker meets_, drains_in_, copies_in_;  // last: their threads use the others
};

}  // namespace tilestone::engine
