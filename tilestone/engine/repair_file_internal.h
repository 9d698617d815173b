// How a file of a checkpoint is made anew, byte for byte as its save wrote it, of what is intact in
// it and of items that other files hold too.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// Bytes of a file of the checkpoint, or zeros.
struct Stretch {
  static constexpr uint32_t kZeros = ~uint32_t{0};
  uint32_t file = kZeros;  // index into Metadata::files
  uint64_t offset = 0;
  uint64_t size = 0;
};

// An item of a file that is made anew, or bytes between items.
struct Section {
  std::vector<Stretch> parts;                    // one after the other
  std::optional<uint32_t> crc32 = std::nullopt;  // of all of them; nullopt: not known
  const std::string* key = nullptr;              // of the item; null: none has a key
};

// A file made anew.
struct Remade {
  bool was_lost = false;                        // it is missing or too short
  std::vector<Section> sections;                // one after the other
  std::map<uint64_t, std::string> mended_from;  // by offset: items, and files that they come from
  std::set<uint64_t> left;                      // offsets of items that stay damaged
};

// Looks into files as they are when it is asked.
class FileMaker {
 public:
  // For these files (indices into Metadata::files). Borrows what was opened, which has a manifest.
  // Everything that reads asks the deadline.
  FileMaker(Storage& storage, const Opened& opened, const std::set<uint32_t>& files,
            Deadline deadline = Deadline::never());

  // `file`: one of those that it was made for.
  // nullopt where the file can't be made anew: it is missing or too short and something of it is
  // intact nowhere; it is no regular file; or the metadata has items in it that overlap.
  std::optional<Remade> make(uint32_t file);
  // The stretch's bytes, piece by piece.
  void each_piece(const Stretch& stretch, const std::function<void(ByteView)>& take);
  // The file has been replaced.
  void forget(uint32_t file) { files_.erase(file); }

 private:
  using Places = std::vector<const ItemLocation*>;

  // An item of a file.
  struct Item {
    const ItemLocation* at = nullptr;
    std::shared_ptr<const Places> places;  // of all that means the same, `at` among them
    uint64_t payload = 0;  // bytes of a chunk's elements; 0: an object, or a part of a file
    const std::string* key = nullptr;
  };

  void list_items(const std::set<uint32_t>& files);
  void list_parts(const std::set<uint32_t>& files);
  void list(const StoredObject& object, const std::set<uint32_t>& files);
  void add(const std::set<uint32_t>& files, Places places, uint64_t payload,
           const std::string* key);
  // Sets have_ and size_; false where the file is not to be touched.
  bool look_at(uint32_t file);
  std::vector<Stretch> bytes_of(const Item& item, Remade& made);
  std::vector<Stretch> from_copy(const Item& item, const ItemLocation& good);
  void add_gap(uint32_t file, uint64_t begin, uint64_t end, Remade& made) const;
  bool is_there(const ItemLocation& at);
  uint32_t crc_of(const std::vector<Stretch>& parts);
  const ReadableFile& open(uint32_t file);

  Storage& storage_;
  const Opened& opened_;
  const Metadata& metadata_;
  const Deadline deadline_;
  std::deque<ItemLocation> parts_;               // how formats begin and end files
  std::map<std::string, uint64_t> written_;      // sizes of files, by name
  std::map<uint32_t, std::vector<Item>> items_;  // by file, and by offset
  std::shared_ptr<BufferPool> buffers_;
  std::map<uint32_t, std::unique_ptr<ReadableFile>> files_;  // some that are open
  uint64_t have_ = 0;  // bytes of the file that is being made anew, as it is
  uint64_t size_ = 0;  // and as it shall be
};

}  // namespace tilestone::engine
