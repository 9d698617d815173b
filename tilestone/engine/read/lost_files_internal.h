// Data files that are missing or too short: what they should hold is read from other files where
// the checkpoint has it once more.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/engine/read/context_internal.h"
#include "tilestone/engine/read/reader_internal.h"
#include "tilestone/state/metadata.h"

namespace tilestone::engine {

// Each file's size is asked once (ReadContext::sizes), and only where there is a choice. Of several
// places that are left, ranks and chunks begin at different ones.
class LostFiles {
 public:
  // Borrows the context.
  explicit LostFiles(const ReadContext& context) : context_(context) {}

  // Whether the file is there and is long enough for the item. True where that can't be asked:
  // opening the file then says why.
  bool holds(const ItemLocation& at);
  // `preferred`, or where its file is lost another place of the chunk (kNoCopy: its own item) that
  // is not, with a warning that names file and key, once for each file. `preferred` where there is
  // none.
  uint32_t place_of_chunk(uint32_t tensor, uint32_t chunk, uint32_t preferred);
  // The same for an object's places: `at`, then its copies, by index.
  size_t place_of_object(const StoredObject& object, size_t preferred);

  // A place of the chunk that is not among `tried`, nor in a lost file.
  std::optional<uint32_t> place_besides(uint32_t tensor, uint32_t chunk,
                                        const std::set<uint32_t>& tried);
  // The same of an object.
  std::optional<size_t> place_besides(const StoredObject& object, const std::set<size_t>& tried);

  // Gives transfers whose file is lost another place, if there is one.
  void avoid(std::vector<Transfer>& transfers);

 private:
  uint64_t size_of(uint32_t file);
  void warn(const ItemLocation& at, const std::string& key);

  const ReadContext& context_;
};

// An object's own item, or the copy that is `place` less one.
inline const ItemLocation& place_of(const StoredObject& object, size_t place) {
  return place == 0 ? object.at : object.copies.at(place - 1);
}

}  // namespace tilestone::engine
