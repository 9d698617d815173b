// Copies of a step's files on another host, so that a lost host loses no step.
//
// The hosts form a ring, in which each keeps the files of the ranks of one before it of another
// domain. The first rank of a host reads them there (HostReads). What has arrived lies beside the
// host's own files under the same names, so a restore and a drain find it like any other file.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"

namespace tilestone::engine {

// By rank: the first rank of the host that keeps the files of the rank, too. `first_of`: by rank,
// the first rank of its host. `domains`: of each rank; empty: each host is one.
// Error(kInvalidArgument) unless every host has another one to which its files go, and there are as
// many domains as ranks.
std::vector<int> copy_targets(const std::vector<int>& first_of,
                              const std::vector<std::string>& domains);

// Copies to this host what it lacks: of its own ranks, if it was replaced, and of those whose files
// it keeps. Every rank, in its thread. Throws if that has failed here; what has arrived completely
// stays. A host that hangs is waited for as long as `patience`: a turn waits for its disk.
void copy_from_hosts(const Communicator& comm, const HostFolder& folder, uint64_t step,
                     const std::string& save_id, const std::vector<int>& first_of,
                     const std::vector<int>& targets, std::chrono::duration<double> patience,
                     const std::shared_ptr<Interrupt>& interrupt);

}  // namespace tilestone::engine
