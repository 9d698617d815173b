// A fast tier: each host's own directory, to which a run's steps are saved first. Copying them to
// the run's directory (draining) follows in the background.
//
// A step on the hosts is whole once every rank's files and on each host the step's index are
// durable; ARCHITECTURE.md names the files. A restore takes the newest step of the run that is
// whole on the hosts or in the run's directory. What a rank lacks, it reads from the host that has
// it, so the layout may be another one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/run/inventory.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/engine/training_run/checkpoint_manager.h"

namespace tilestone {

namespace engine {
class Tier;
}  // namespace engine

struct FastOptions {
  std::string path;     // a directory that each host has for itself, or that hosts share
  uint64_t keep = 2;    // the newest steps that stay there; at least 1
  bool copies = false;  // each host also keeps the files of another one
  std::vector<std::string> domains = {};  // with copies: of each rank; a host copies to another one
  uint64_t drain_every = 1;  // steps that are multiples of it are drained, and those saved by force
  std::optional<uint64_t> drain_bytes_per_second = std::nullopt;  // of each host; nullopt: no limit
  bool reuse = false;  // what the step before has there is linked, as with SaveOptions::reuse
  std::chrono::duration<double> patience{600};  // how long ranks that drain wait for one another
  std::chrono::duration<double> first_wait{1};  // until a failed drain is tried again
};

// One rank's end. All ranks make it, and call begin() and restore(), together. Used by one thread
// at a time.
class FastTier {
 public:
  // `meeting`, `draining`, `copying`: communicators of the run's ranks that nothing else uses,
  // because threads of the tier do; the last one is used with copies only. `run` has
  // RunOptions::on_hosts and must outlive this object. Every rank throws Error(kInvalidArgument)
  // for options that are out of range on one, kAlreadyExists if another process uses a host's
  // directory, and what its file system throws.
  FastTier(ManagedRun& run, FastOptions options, Communicator meeting, Communicator draining,
           Communicator copying, Deadline deadline);
  ~FastTier();  // end()
  FastTier(FastTier&& other) noexcept = default;

  // Before a save of the step: `begun`, of ManagedRun::save(), then saves to the hosts.
  // `forced`: it is drained whatever its number. Returns the end of its draining, or if it stays on
  // the hosts, of the save.
  Pending begin(uint64_t step, bool forced, RunStep& begun);
  // Whether a save has failed, because a host's disk was full after its call, since the last
  // went_straight(). Alike on all ranks, unless one has lost the others.
  bool is_full() const;
  // What was begun is saved straight to the run's directory instead, which is said once with `why`.
  void leave(RunStep& begun, const std::string& why);
  void went_straight();
  // Whether the ranks have planned the save, so that what it throws may be of the hosts.
  bool has_begun(const RunStep& begun) const;
  // Every rank calls: the URL, valid in this process, under which rank 0 reads the index of a step
  // of this run that is on its host; "" on all ranks: its host has none.
  std::string url_of(const Communicator& comm, uint64_t step, const Deadline& deadline) const;

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

 private:
  std::shared_ptr<engine::Tier> tier_;
};

}  // namespace tilestone
