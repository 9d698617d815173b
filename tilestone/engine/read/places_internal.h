// Where a rank of a load reads chunks and objects that have copies: from their own items or from
// one of the copies. (If that place is damaged or lost, lost_files_internal.h finds another one.)
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/plan/nearest.h"

namespace tilestone::engine {

// The tensors that a rank requests under the name of a tensor-parallel rank's replica
// (open/tp_replicas_internal.h): plain key -> that rank.
using AskedReplicas = std::map<std::string, uint32_t>;

// Chooses the places for rank `rank` of the `world` ranks that load. Call choose() for objects
// first, then for chunks. Without copies everything is read from its own item.
class Places {
 public:
  // Borrows `opened`.
  Places(const Opened& opened, int rank, int world);
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  // Removes and returns the transfers that no other rank needs to read for this rank: those from
  // copies in its own file, and those of a requested replica, which are read where that replica is
  // stored.
  std::vector<Transfer> take_own_copies(std::vector<Transfer>& transfers,
                                        const AskedReplicas& asked) const;
  // Sets the nearest place for each transfer that has none yet.
  void choose(std::vector<Transfer>& transfers);
  // Where this rank reads an object (ObjectRead::place).
  size_t choose(const StoredObject& object);
  // For each file the rank that reads it for the others (StripeOwners): the rank that wrote it.
  // Empty if the number of ranks has changed since the save, or if no chunk has copies.
  std::vector<int> file_owners() const;

 private:
  uint32_t own_replica(const Transfer& transfer, const AskedReplicas& asked) const;

  const Opened& opened_;
  const Metadata& metadata_;
  bool same_world_ = false;
  std::vector<FileWriter> writers_;  // by file
  std::optional<Nearest> nearest_;   // set if there are copies
};

}  // namespace tilestone::engine
