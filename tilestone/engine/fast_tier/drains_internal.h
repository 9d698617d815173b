// Draining: the steps of a fast tier that are to be copied to the run's directory, one after the
// other, oldest first. drains.cc describes the protocol.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/comm/communicator.h"
#include "tilestone/engine/fast_tier/copying_internal.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/run/pending_internal.h"
#include "tilestone/engine/run/rounds_internal.h"

namespace tilestone::engine {

struct DrainCommit;  // rank 0's part of one drain

struct FastOptions {
  std::string path;     // a directory that each host has for itself, or that hosts share
  uint64_t keep = 2;    // the newest steps that stay there; at least 1
  bool copies = false;  // each host also keeps the files of another one
  std::vector<std::string> domains = {};  // with copies: of each rank; a host copies to another one
  uint64_t drain_every = 1;  // steps that are multiples of it are drained, and those saved by force
  std::optional<uint64_t> drain_bytes_per_second = std::nullopt;  // of each host; nullopt: no limit
  bool reuse = false;  // what the step before has there is linked, as with SaveOptions::reuse
  std::chrono::duration<double> patience{
      600};  // how long ranks that drain or copy wait for one another
  std::chrono::duration<double> first_wait{1};  // until a failed drain is tried again
};

// Thread-safe.
class Drains {
 public:
  // `drained`: called once the run's directory has a step.
  Drains(RunDirectory run, HostFolder folder, const FastOptions& options,
         std::function<void(uint64_t step)> drained);

  // The step waits from now on. Every rank calls, and then gives its thread work().
  // `ended`: ended once the run's directory has the step.
  void add(uint64_t step, const std::string& save_id, std::shared_ptr<Pending::State> ended);
  // Whether its files must stay.
  bool is_pinned(const std::string& save_id) const;
  // The step waits no more: `why` ends what waits for it.
  void drop(const std::string& save_id, const Error& why);
  bool is_stalled() const;  // the last try has failed
  std::vector<uint64_t> waiting() const;

  // The step of the run's directory that was loaded, or drained: the next drain may link its files.
  // nullopt: the hosts' was loaded, so nobody has read the files there, and the next drain copies.
  void note_earlier(std::optional<uint64_t> step);

  // Drains until nothing waits, or stop(). Every rank, in its own thread. `is_first`: of its host.
  void work(const Communicator& comm, bool is_first);
  void stop();
  // After work(): what still waits stays on the hosts, and nobody waits for it any more.
  void leave();

 private:
  struct Waiting {
    uint64_t step = 0;
    std::shared_ptr<Pending::State> ended;
  };
  // By when the ranks must have heard of one another.
  Deadline turn_end() const { return Deadline::after(patience_).with_interrupt(interrupt_); }
  std::shared_ptr<Pending::State> take(const std::string& save_id);
  std::optional<SaidStep> choose(const Communicator& comm, bool is_first);
  Bytes say(int rank, bool is_first);
  void drain(const Communicator& comm, const SaidStep& step);
  Bytes begin_together(const Communicator& comm, const SaidStep& step, DrainCommit& commit,
                       const std::shared_ptr<Storage>& location);
  void copy_together(const Communicator& comm, const SaidStep& step, DrainCommit& commit,
                     StepCopy& work);
  void commit_together(Rounds& last, const SaidStep& step, DrainCommit& commit);
  void copy(const SaidStep& step, int rank, StepCopy& work, const Deadline& deadline) const;
  void ended(const SaidStep& step);
  void note_stalled(bool is_stalled);
  void say_failure(const Error& error, double wait);

  const RunDirectory run_;
  const HostFolder folder_;
  const std::optional<uint64_t> rate_;
  const std::chrono::duration<double> patience_;
  const double first_wait_;  // seconds
  const std::function<void(uint64_t)> drained_;
  const std::shared_ptr<Interrupt> interrupt_ = std::make_shared<Interrupt>();
  std::string committed_;     // on rank 0, in work(): the save id of what was drained last
  mutable std::mutex mutex_;  // guards the following
  std::map<std::string, Waiting> waiting_;
  std::set<std::string> pinned_;
  std::shared_ptr<const Location> earlier_;  // the step that was drained last, or loaded; or null
  bool is_stalled_ = false;
};

}  // namespace tilestone::engine
