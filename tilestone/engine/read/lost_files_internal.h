// Lost data files: files that are missing or too short. Their chunks and objects are read from
// copies in other files, where the checkpoint has copies.
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

// A place is where a chunk or an object is stored: its own item or a copy. A file's size is queried
// once (ReadContext::sizes), and only for chunks and objects that have copies. If several places
// are left, different ranks and chunks try different ones first.
class LostFiles {
 public:
  // Borrows the context.
  explicit LostFiles(const ReadContext& context) : context_(context) {}

  // Whether the file exists and is long enough for the item. True if that can't be determined:
  // opening the file then reports why.
  bool holds(const ItemLocation& at);
  // `preferred` (kNoCopy: the chunk's own item) if its file is not lost. Otherwise another place of
  // the chunk whose file is not lost, with a warning that names file and key, once per file; or
  // `preferred` if there is none.
  uint32_t place_of_chunk(uint32_t tensor, uint32_t chunk, uint32_t preferred);
  // The same for an object's places: `at`, then its copies, by index.
  size_t place_of_object(const StoredObject& object, size_t preferred);

  // A place of the chunk that is neither in `tried` nor in a lost file.
  std::optional<uint32_t> place_besides(uint32_t tensor, uint32_t chunk,
                                        const std::set<uint32_t>& tried);
  // The same for an object.
  std::optional<size_t> place_besides(const StoredObject& object, const std::set<size_t>& tried);

  // Changes transfers whose file is lost to another place, if there is one.
  void avoid(std::vector<Transfer>& transfers);

 private:
  uint64_t size_of(uint32_t file);
  void warn(const ItemLocation& at, const std::string& key);

  const ReadContext& context_;
};

// Place 0 is the object's own item, place i is copy i - 1.
inline const ItemLocation& place_of(const StoredObject& object, size_t place) {
  return place == 0 ? object.at : object.copies.at(place - 1);
}

}  // namespace tilestone::engine
