// A checkpoint whose description is parsed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/open/tp_replicas_internal.h"
#include "tilestone/format/format.h"
#include "tilestone/format/manifest.h"
#include "tilestone/storage/storage.h"

namespace tilestone::engine {

struct Opened {
  std::shared_ptr<const Format> format;
  std::shared_ptr<const Dialect> dialect;
  DirectoryFiles files;  // the index
  Metadata metadata;     // with the manifest's checksums
  // The object with the common state, if the dialect keeps it in an object. It is not in
  // `metadata`.
  std::optional<StoredObject> common;
  std::optional<Manifest> manifest;   // of a rank-local checkpoint: made from the ranks' receipts
  ReplicaNames replica_names = {};    // second names that the index has and `metadata` lacks
  ReplicaPlaces replica_places = {};  // of tensors that were united

  bool has_manifest_file() const { return manifest && !metadata.rank_local; }
};

// Error(kNotFound) if this rank's held storage has another checkpoint than the one that the
// coordinator has described. Checks only formats with fixed names: elsewhere the names of data
// files contain the save id.
void expect_same_checkpoint(Storage& storage, const Opened& opened);

// How to treat second names of replicas (tp_replicas_internal.h).
enum class SecondNames : uint8_t {
  kUnited,  // in Megatron-Core's dialect, a tensor has only its plain name
  kAsStored,
};
// Parses a description. Error(kCorrupt) if manifest and metadata contradict each other.
Opened open_description(DescribingFiles description, const std::shared_ptr<const Format>& wanted,
                        SecondNames names = SecondNames::kUnited);

}  // namespace tilestone::engine
