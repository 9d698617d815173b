// Where a rank of a load reads chunks of which the checkpoint has copies.
#pragma once

#include <optional>
#include <vector>

#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/plan/nearest.h"

namespace tilestone::engine {

// For the rank `rank` of `world` that load. Objects are chosen first, then chunks. Nothing to
// choose where there are no copies.
class Places {
 public:
  // Borrows what was opened.
  Places(const Opened& opened, int rank, int world);
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  // Takes out the transfers that this rank reads from copies in its own file: no rank needs to
  // read them for it.
  std::vector<Transfer> take_own_copies(std::vector<Transfer>& transfers) const;
  // Gives each transfer that is read from its chunk's own item the nearest place.
  void choose(std::vector<Transfer>& transfers);
  // Where this rank reads an object (ObjectRead::place).
  size_t choose(const StoredObject& object);
  // Who reads a file's bytes for others (StripeOwners): the rank whose own it is. Empty where the
  // files are nobody's own, and where there are no copies.
  std::vector<int> file_owners() const;

 private:
  const Metadata& metadata_;
  bool same_world_ = false;
  std::vector<FileWriter> writers_;  // of the files
  std::optional<Nearest> nearest_;   // where there are copies
};

}  // namespace tilestone::engine
