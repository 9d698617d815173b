// Finding a checkpoint and reading what describes it: the format's metadata and our manifest.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/format/known/known.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

// True when a checkpoint of any known format, or of `also`, stands there.
bool any_checkpoint(Storage& storage, const Format& also);

// A save without a communicator, in a dialect whose files have fixed names, publishes its index
// file by file (commit/attempt.cc): the first one, which names the save, is its claim to the
// location. The save of a claim that stands there while its switch does not; what is there of its
// index makes no checkpoint.
std::optional<std::string> claimed_by(Storage& storage);

// The files that describe a checkpoint. One rank reads them; the others get the bytes.
struct Description {
  std::string format;
  std::string dialect;
  DirectoryFiles files;              // the index; `names` are those of contents and sizes
  Bytes manifest;                    // its file's bytes; empty: there is none
  std::string manifest_file;         // not encoded
  std::optional<Metadata> metadata;  // of `files`, where this rank has parsed them; not encoded

  Bytes encode() const;
  static Description decode(ByteView bytes);
};

// The storage as it stands now: one that stays with the directory, should a save exchange it for
// another (Storage::held). The same one where there is no directory.
std::shared_ptr<Storage> hold(const std::shared_ptr<Storage>& storage);

struct Found {
  std::shared_ptr<Storage> storage;  // held
  DetectedFormat format;
  Description description;
  bool of_own_rank = false;  // the description is that of `own_rank` alone
};
// What stands there, as of one moment, though a save may replace it meanwhile; a format that the
// caller wants goes before what the files look like. Of a rank-local checkpoint only what
// `own_rank` has written is described, if that rank has its metadata there. Error(kNotFound) when
// there is no checkpoint, or a rank-local one of which ranks are missing, which it names.
Found find_checkpoint(const std::shared_ptr<Storage>& storage,
                      const std::shared_ptr<const Format>& wanted,
                      std::optional<int> own_rank = std::nullopt);

struct Opened {
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
  DirectoryFiles files;  // the index
  Metadata metadata;     // with the manifest's checksums
  // Holds the common state, where the dialect keeps it in an object: not among metadata's.
  std::optional<StoredObject> common;
  std::optional<Manifest> manifest;
  ReplicaNames replica_names = {};    // that the index has beside the metadata's
  ReplicaPlaces replica_places = {};  // of tensors that were united
};

// Error(kNotFound) where this rank's storage, held, has another checkpoint than the one that the
// coordinator has described, as far as that matters: the names of its data files don't say it.
void expect_same_checkpoint(Storage& storage, const Opened& opened);

// What to make of second names of replicas (tp_replicas_internal.h).
enum class SecondNames : uint8_t {
  kUnited,  // in Megatron-Core's dialect a tensor has its plain name alone
  kAsStored,
};
// Error(kCorrupt) when manifest and metadata contradict one another.
Opened open_description(Description description, const std::shared_ptr<const Format>& wanted,
                        SecondNames names = SecondNames::kUnited);

// What the checkpoint that stands at a location consists of.
struct Standing {
  bool found = false;
  std::string save_id;               // "": another writer's
  std::set<std::string> files;       // its data files, those of copies too, and its manifest
  std::set<std::string> index;       // the files that describe it
  std::set<std::string> rank_local;  // those, when it is a rank-local one
};
// Not found: no error. Errors: those of reading one that is there.
Standing read_standing(Storage& storage, const std::shared_ptr<const Format>& format);

// The metadata files of a rank-local checkpoint that the save `save_id` replaces, by content.
struct Replaced {
  std::string save_id;
  std::map<std::string, uint64_t> files;  // name -> XXH3

  Bytes encode() const;
  static Replaced decode(ByteView bytes);
};

// What the metadata file that stands there has replaced, when that save was interrupted before it
// removed the rank-local files; nullopt when nothing is left to do.
std::optional<Replaced> find_replaced(Storage& storage, const Format& format);

}  // namespace tilestone::engine
