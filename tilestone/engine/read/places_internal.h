// Where a rank of a load reads chunks and objects that have copies.
#pragma once

#include <optional>
#include <vector>

#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/plan/nearest.h"

namespace tilestone::engine {

// Chooses the places for rank `rank` of the `world` ranks that load. Call choose() for objects
// first, then for chunks. Without copies everything is read from its own item.
class Places {
 public:
  // Borrows `opened`.
  Places(const Opened& opened, int rank, int world);
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  // Removes and returns the transfers that this rank reads from copies in its own file: no other
  // rank needs to read them for it.
  std::vector<Transfer> take_own_copies(std::vector<Transfer>& transfers) const;
  // Sets the nearest place for each transfer that has none yet.
  void choose(std::vector<Transfer>& transfers);
  // Where this rank reads an object (ObjectRead::place).
  size_t choose(const StoredObject& object);
  // For each file the rank that reads it for the others (StripeOwners): the rank that wrote it.
  // Empty if the number of ranks has changed since the save, or if no chunk has copies.
  std::vector<int> file_owners() const;

 private:
  const Metadata& metadata_;
  bool same_world_ = false;
  std::vector<FileWriter> writers_;  // by file
  std::optional<Nearest> nearest_;   // set if there are copies
};

}  // namespace tilestone::engine
