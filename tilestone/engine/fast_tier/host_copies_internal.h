// Copies of a step's files on another host, so that a lost host loses no step.
//
// The hosts form a ring, in which each sends the files of its own ranks to the next one of another
// domain. All ranks take the same turns until every host has sent everything; in a turn a host
// sends 4 MiB and gets as much. The first rank of a host does the work. What has arrived lies
// beside the host's own files under the same names, so a restore and a drain find it like any other
// file.
#pragma once

#include <string>
#include <vector>

#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"
#include "tilestone/engine/fast_tier/host_folder_internal.h"
#include "tilestone/engine/fast_tier/met_hosts_internal.h"

namespace tilestone::engine {

// By rank: the first rank of the host that gets the files of the rank's host; -1 for a rank that is
// not the first of its host. `domains`: of each rank; empty: each host is one.
// Error(kInvalidArgument) unless every host has another one to send to, and there are as many
// domains as ranks.
std::vector<int> copy_targets(const std::vector<int>& first_of,
                              const std::vector<std::string>& domains);

// Sends and receives what is in the folder. Every rank, in its thread. Throws the error of any
// rank; then what has arrived completely stays. A host that hangs is waited for ten minutes.
void copy_to_hosts(const Communicator& comm, const HostFolder& folder, const std::string& save_id,
                   const std::vector<int>& targets, const std::shared_ptr<Interrupt>& interrupt);

}  // namespace tilestone::engine
