// Which ranks share a directory of a fast tier: found by a file that each rank leaves and looks
// for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct MetHosts {
  std::vector<int> first_of;            // by rank, the lowest rank that sees the same directory
  uint64_t ordinal = 0;                 // the highest of all steps there
  std::unique_ptr<StorageClaim> claim;  // on the first rank of a host: of the directory

  bool is_first(int rank) const { return first_of.at(static_cast<size_t>(rank)) == rank; }
};

// Every rank. The first rank of each host then holds the directory, and has removed leftovers.
// Error(kAlreadyExists) if another process holds one. What `check` throws on a rank, all throw, and
// nothing was made.
MetHosts meet_hosts(const Communicator& comm, const HostFolder& folder,
                    const std::function<void()>& check, const Deadline& deadline);

}  // namespace tilestone::engine
