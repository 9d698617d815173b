// Items that have no copies, because files of the index say all that they hold: chunks without
// elements, and the object with Megatron-Core's common state. They are encoded anew.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/state/metadata.h"

namespace tilestone::engine {

class FromIndex {
 public:
  struct Encoded {
    std::string file;  // of the index; it describes the item
    std::shared_ptr<const Bytes> bytes;
  };

  // Borrows `opened`, which must have a manifest.
  explicit FromIndex(const Opened& opened) : opened_(opened) {}

  // The bytes of a chunk's item at `at`. nullopt if the chunk has elements, or if these are not the
  // bytes that the save has recorded.
  std::optional<Encoded> chunk(const StoredTensor& tensor, const StoredChunk& chunk,
                               const ItemLocation& at);
  // The bytes of the common state's object at `at`. nullopt if no file of the index holds the
  // common state, or if these are not the bytes that the save has recorded.
  std::optional<Encoded> common(const ItemLocation& at);

 private:
  ItemEncoder& encoder();

  const Opened& opened_;
  std::unique_ptr<ItemEncoder> encoder_;  // null until it is needed
};

}  // namespace tilestone::engine
