// Rebuilds a file of a checkpoint, byte for byte as its save wrote it, from its intact parts and
// from items that other files hold too.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tilestone/base/buffer_pool.h"
#include "tilestone/base/deadline.h"
#include "tilestone/engine/checkpoint/repair_from_index_internal.h"
#include "tilestone/engine/open/opening_internal.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// A range of bytes of a file of the checkpoint, or zeros, or bytes that were encoded anew.
struct Stretch {
  static constexpr uint32_t kZeros = ~uint32_t{0};
  uint32_t file = kZeros;  // index into Metadata::files
  uint64_t offset = 0;
  uint64_t size = 0;
  std::shared_ptr<const Bytes> encoded = nullptr;  // if not null: these bytes, whatever `file` says
};

// An item of a rebuilt file, or the bytes between two items.
struct Section {
  std::vector<Stretch> parts;                    // concatenated
  std::optional<uint32_t> crc32 = std::nullopt;  // of the whole section; nullopt: unknown
  const std::string* key = nullptr;              // of the item; null: there is none
};

// The new content of a file.
struct Remade {
  bool was_lost = false;                        // the file is missing or too short
  bool changes = false;                         // the file does not have this content already
  std::vector<Section> sections;                // concatenated
  std::map<uint64_t, std::string> mended_from;  // item offset -> file that still says what it held
  std::set<uint64_t> left;                      // offsets of the items that remain damaged
  bool left_unreadable = false;                 // the disk can't read some of these
};

// Storage::stat(). A symbolic link that leads out of the directory, which verify reports, is not a
// regular file: it is neither read nor replaced.
std::optional<FileInfo> stat_for_repair(Storage& storage, const std::string& name);

// Rebuilds files. Reads each file in the state that it has when make() is called.
class FileMaker {
 public:
  // `files`: the files that make() may be called for (indices into Metadata::files). Borrows
  // `opened`, which must have a manifest. Every read checks `deadline`.
  FileMaker(Storage& storage, const Opened& opened, const std::set<uint32_t>& files,
            Deadline deadline = Deadline::never());

  // `file`: one of the files given to the constructor. Returns nullopt if the file can't be
  // rebuilt: it is missing, too short or in part unreadable (EIO), and some of what it lacks is
  // intact nowhere; it is not a regular file;
  // the manifest does not list it; or one of its items has no checksum, overlaps another item or
  // lies outside the file.
  std::optional<Remade> make(uint32_t file);
  // Passes the bytes of the stretch to `visit`, block by block.
  void each_block(const Stretch& stretch, const std::function<void(ByteView)>& visit);
  // The size that the save wrote, bytes; 0: the manifest does not list the file.
  uint64_t written_size(uint32_t file) const;
  // Call this after the file was replaced: closes the old one.
  void forget(uint32_t file) { files_.erase(file); }

 private:
  using Locations = std::vector<const ItemLocation*>;
  // Encodes the item at this place anew.
  using Anew = std::function<std::optional<FromIndex::Encoded>(const ItemLocation&)>;

  // An item of a file.
  struct Item {
    const ItemLocation* at = nullptr;
    std::shared_ptr<const Locations> places;  // of all instances of the item, including `at`
    uint64_t payload = 0;  // bytes of a chunk's elements; 0: an object or file part
    const std::string* key = nullptr;
    Anew anew = {};  // empty if only the item's own bytes, or a copy's, say what it holds
  };

  void list_items(const std::set<uint32_t>& files);
  void list(const StoredObject& object, const std::set<uint32_t>& files, const Anew& anew = {});
  void add(const std::set<uint32_t>& files, Locations places, uint64_t payload,
           const std::string* key, const Anew& anew = {});
  // Sets have_ and size_. Returns false if the file must not be changed.
  bool look_at(uint32_t file);
  std::vector<Stretch> bytes_of(const Item& item, Remade& made);
  std::vector<Stretch> from_copy(const Item& item, const ItemLocation& good);
  void add_gap(uint32_t file, uint64_t begin, uint64_t end, Remade& made);
  bool is_there(const ItemLocation& at);
  std::optional<uint32_t> crc_of(const std::vector<Stretch>& parts);  // nullopt: EIO
  const ReadableFile& open(uint32_t file);

  Storage& storage_;
  const Opened& opened_;
  const Metadata& metadata_;
  const Deadline deadline_;
  const std::vector<ItemLocation> parts_;          // the beginnings and ends of files
  const std::map<std::string, uint64_t> written_;  // file name -> recorded size, bytes
  std::map<uint32_t, std::vector<Item>> items_;    // by file, each list by offset
  FromIndex from_index_;
  std::shared_ptr<BufferPool> buffers_;
  std::map<uint32_t, std::unique_ptr<ReadableFile>> files_;  // files that are open
  uint64_t have_ = 0;  // present size of the file that is being rebuilt, bytes
  uint64_t size_ = 0;  // its size as its save wrote it
};

}  // namespace tilestone::engine
