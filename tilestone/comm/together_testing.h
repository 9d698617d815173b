// What all ranks of a group do at once, for tests.
#pragma once

#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/comm/communicator.h"

namespace tilestone {

// The bytes of every rank, by rank, on every rank.
inline std::vector<Bytes> all_gather(const Communicator& comm, ByteView mine, Deadline deadline) {
  const std::vector<Bytes> to_all(static_cast<size_t>(comm.size()),
                                  Bytes(mine.begin(), mine.end()));
  return comm.all_to_all(to_all, deadline);
}
// Returns when all ranks have called it.
inline void all_arrive(const Communicator& comm, Deadline deadline) {
  all_gather(comm, {}, deadline);
}

}  // namespace tilestone
