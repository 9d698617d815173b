// Where a rank of a load reads chunks and objects that have copies: from their own items or from
// one of the copies. (If that place is damaged or lost, lost_files_internal.h finds another one.)
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/plan/nearest.h"

namespace tilestone::engine {

// The tensors that a rank requests under the name of a tensor-parallel rank's replica
// (open/tp_replicas_internal.h): plain key -> that rank.
using AskedReplicas = std::map<std::string, uint32_t>;

// Chooses the places for rank `rank` of the `world` ranks that load. Call expect() first, then
// choose() for objects, then the others for chunks. Without copies everything is read from its own
// item.
//
// A file belongs to the rank that wrote it: as the manifest says, and without a manifest as the
// file's name says. It is this rank's own if the checkpoint was saved by as many ranks. Without a
// manifest that number is not known: then no file may belong to a rank that does not exist now.
class Places {
 public:
  // Borrows `opened`.
  Places(const Opened& opened, int rank, int world);
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  // Notes everything that this rank will read, so that it opens few files.
  void expect(std::span<const Transfer> transfers, std::span<const ObjectRead> objects);
  // Removes and returns the transfers that no other rank needs to read for this rank: those from
  // copies in its own file, and those of a requested replica, which are read where that replica is
  // stored. With `open_few` also those that are read from any other copy, because otherwise this
  // rank would have to open the file of the chunk's own item; and all, if the files differ so much
  // in size that a few ranks would read for all.
  std::vector<Transfer> take_own_copies(std::vector<Transfer>& transfers,
                                        const AskedReplicas& asked, bool open_few);
  // Sets the nearest place for each transfer that has none yet.
  void choose(std::vector<Transfer>& transfers);
  // Where this rank reads an object (ObjectRead::place).
  size_t choose(const StoredObject& object);
  // For each file the rank that reads it for the others (StripeOwners): the rank that it belongs
  // to. Empty if no file is a rank's own, if no chunk has copies, or if the files differ so much in
  // size that a few ranks would read for all.
  std::vector<int> file_owners() const;

 private:
  using ChunkKey = std::pair<uint32_t, uint32_t>;  // tensor, chunk

  void find_writers();
  void weigh_files();
  uint32_t own_replica(const Transfer& transfer, const AskedReplicas& asked) const;
  // All of a chunk is read from one place. Parts read from two places could not be checked.
  uint32_t choose_once(const Transfer& transfer);

  const Opened& opened_;
  const Metadata& metadata_;
  const int world_;
  bool same_world_ = false;          // whether files are ranks' own
  uint64_t mean_ = 0, most_ = 0;     // bytes in the files of a rank
  std::vector<FileWriter> writers_;  // by file
  std::map<ChunkKey, uint32_t> chosen_;
  std::optional<Nearest> nearest_;  // set if there are copies
};

}  // namespace tilestone::engine
