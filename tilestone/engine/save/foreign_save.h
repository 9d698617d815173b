// A save that another program plans, such as torch.distributed.checkpoint with a planner of its
// user. That program decides who writes what, and carries messages between the ranks:
//
//  1. The coordinator makes a ForeignSave, and tells every rank its save id and sibling().
//  2. Each rank calls write_foreign(), once or several times, and sends the receipts to the
//     coordinator.
//  3. The coordinator calls commit() with all receipts, or abandon().
//
// The format is torch_dist. The commit protocol is that of every save (engine/commit/).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/base/deadline.h"
#include "tilestone/engine/run/options.h"
#include "tilestone/geometry/box.h"
#include "tilestone/state/tensor_view.h"

namespace tilestone {

// A box of a tensor, and its elements. `data` has the box's shape and must have data.
struct ForeignChunk {
  std::string key;
  Dims global_shape;
  Box box;
  TensorView data;
};

// An item that the other program has encoded: an object, or a chunk that it has transformed
// (compressed). The receipt then has the item's checksum, but not that of the elements.
struct ForeignBytes {
  struct Chunk {
    DType dtype = DType::kFloat32;
    Dims global_shape;
    Box box;
  };
  std::string key;
  SharedBytes bytes;
  std::optional<Chunk> chunk = std::nullopt;
};

// What one rank writes in one call. The items with bytes come first in its file.
struct ForeignShare {
  std::string save_id;
  int rank = 0;
  int world_size = 1;
  std::string sibling = {};  // as ForeignSave::sibling()
  int first_file = 0;        // how many files this rank's earlier calls have written
  std::vector<ForeignBytes> encoded;
  std::vector<ForeignChunk> chunks;
};

// Where an item was written.
struct ForeignPlace {
  std::string file;     // relative to the location
  uint64_t offset = 0;  // bytes
  uint64_t length = 0;  // bytes
};

struct ForeignWritten {
  Bytes receipt;
  int files = 0;                      // how many it has written
  std::vector<ForeignPlace> encoded;  // in the order of ForeignShare::encoded
  std::vector<ForeignPlace> chunks;   // likewise
};

// Writes the items to new files, which are durable when it returns. On failure removes them. Throws
// Error(kInvalidArgument), naming the key, if a chunk's data and box differ in shape or a box is
// outside its tensor, and what save() throws when a rank writes.
ForeignWritten write_foreign(const Location& location, const ForeignShare& share,
                             const Resources& resources, Deadline deadline);

// The coordinator's part. Holds the location's lock. Its calls may come from different threads, one
// at a time. If neither commit() nor abandon() was called, the destructor abandons the save.
class ForeignSave {
 public:
  // Begins the save. save_id: a random UUID in lower case. Throws what save() throws when it begins
  // at its location: kAlreadyExists if there is a checkpoint and `overwrite` is false.
  ForeignSave(const Location& location, std::string save_id, bool overwrite, Deadline deadline);
  const std::string& save_id() const;
  // The directory beside the location in which all ranks write; "": they write in the location.
  std::string sibling() const;

  // Publishes the checkpoint with `index` as its `.metadata`, which the program has made. Ranks
  // that have no receipt have written nothing. `files`: further data files that the index names,
  // which the program has written itself. With such files, or if some elements were not written, no
  // manifest can describe the checkpoint: a warning says so, and the checkpoint has no checksums.
  // Throws what save() throws when it commits, among them kMismatch if a file is not here. The save
  // is over in any case; if it was not published, the files of all ranks are removed.
  void commit(std::span<const Bytes> receipts, int world_size, Bytes index,
              std::span<const std::string> files, Deadline deadline);
  // Ends the save. Data files are leftovers, which the next save at the location removes.
  // `none_writes`: no rank writes any more. Then nothing of the save stays if there are none.
  void abandon(bool none_writes = false);

 private:
  struct State;
  struct Ends {
    void operator()(State* state) const;
  };
  std::unique_ptr<State, Ends> state_;
};

}  // namespace tilestone
