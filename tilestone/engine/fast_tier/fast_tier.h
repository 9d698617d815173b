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
#include <optional>
#include <string>
#include <vector>

namespace tilestone {

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

}  // namespace tilestone
