// The files that describe a checkpoint: the index of its format, and Tilestone's manifest.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/engine/open/detect_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// The files that describe a checkpoint. One rank reads them; the others get the bytes.
struct DescribingFiles {
  std::string format;
  std::string dialect;
  DirectoryFiles files;  // the index; `names` has the names in contents and sizes
  // The file's bytes; for a rank-local checkpoint, manifest_of_receipts(). Empty if there is none.
  Bytes manifest;
  std::string manifest_file;         // not encoded
  std::optional<Metadata> metadata;  // parsed from `files`, on the rank that read them; not encoded

  Bytes encode() const;
  static DescribingFiles decode(ByteView bytes);
};

// A storage that stays with the present directory even if a save exchanges it for another one
// (Storage::held). The same storage if there is no directory.
std::shared_ptr<Storage> hold(const std::shared_ptr<Storage>& storage);

struct Found {
  std::shared_ptr<Storage> storage;  // held
  DetectedFormat format;
  DescribingFiles description;
  bool of_own_rank = false;  // the description covers `own_rank` only
};
// Finds and describes the checkpoint. The description is consistent even if a save replaces the
// checkpoint meanwhile. `wanted`: a format that overrides detection; may be null. `own_rank`: for a
// rank-local checkpoint, describes only what this rank has written, if its metadata exists.
// `unmarked`: the dialect of a checkpoint in PyTorch's dialect by its files, unless its manifest
// has another one; null: PyTorch's. `at_once`: see names_of_checkpoint(). Error(kNotFound) if there
// is no checkpoint, or a rank-local one with missing ranks, which it names.
Found find_checkpoint(const std::shared_ptr<Storage>& storage,
                      const std::shared_ptr<const Format>& wanted,
                      std::optional<int> own_rank = std::nullopt,
                      const std::shared_ptr<const Dialect>& unmarked = nullptr,
                      std::vector<std::string> at_once = {});

// The files of the existing checkpoint at a location.
struct ExistingCheckpoint {
  bool found = false;
  std::string save_id;               // "" if another writer made it
  std::set<std::string> files;       // data files, also those with copies only, and the manifest
  std::set<std::string> index;       // the files of the index
  std::set<std::string> rank_local;  // the same, if it is a rank-local checkpoint
};
// `found` is false if there is no checkpoint. Throws the errors of reading an existing one.
ExistingCheckpoint read_existing(Storage& storage, const std::shared_ptr<const Format>& format);
// The same of what was found there.
ExistingCheckpoint read_existing(Storage& storage, const Standing& here);

// Whether the checkpoint of this save is published here, for a rank that can't ask the coordinator.
// False, too, if what is here can't be read.
bool holds_checkpoint_of(Storage& storage, const std::shared_ptr<const Format>& format,
                         const std::string& save_id);

// The files of the index, by a manifest's bytes. None if the manifest is damaged, which whoever
// opens the checkpoint reports.
std::vector<IndexSum> sums_in(ByteView manifest, const std::string& file);

// The metadata files of a rank-local checkpoint that the save `save_id` replaces, by content.
struct Replaced {
  std::string save_id;
  std::map<std::string, uint64_t> files;  // name -> XXH3

  Bytes encode() const;
  static Replaced decode(ByteView bytes);
};

// The rank-local files that the existing checkpoint has replaced, if its save was interrupted
// before it removed them; nullopt if nothing is left to do. `names`: names_of_checkpoint().
std::optional<Replaced> find_replaced(Storage& storage, const Format& format,
                                      std::span<const std::string> names);

}  // namespace tilestone::engine
