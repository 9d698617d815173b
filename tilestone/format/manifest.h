// The commit manifest: every rank's report bound into one file, beside the format's own metadata.
// It tells what stock metadata can't: checksums of whole items, payload offsets, file sizes. The
// spec is docs/formats/manifest.md.
//
// The manifest's name holds the save id that the metadata file names, so the one rename that
// publishes the metadata switches both at once, and a manifest of another save is never taken.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tilestone/plan/report.h"
#include "tilestone/storage/storage.h"

namespace tilestone {

struct Manifest {
  std::string save_id;
  int world_size = 1;
  std::string format;               // "torch_dist"
  std::string writer;               // "Tilestone 0.1.0"
  uint64_t metadata_size = 0;       // bytes of the format's metadata file
  uint64_t metadata_xxh3 = 0;       // and their XXH3
  std::vector<RankReport> reports;  // by rank

  Bytes encode() const;
  // The same for reports that are at hand as RankReport::encode() gave them, by rank; `reports` is
  // not looked at.
  Bytes encode(std::span<const Bytes> encoded_reports) const;
  static Manifest decode(ByteView bytes, const std::string& file);  // Error(kCorrupt)
};

std::string manifest_name(std::string_view save_id);  // ".tilestone/SAVE_ID.manifest"

// The manifest of metadata.save_id; nullopt when there is none (another writer's checkpoint).
std::optional<Manifest> read_manifest(Storage& storage, std::string_view save_id);

// Adds the manifest's checksums to the locations in `metadata`, and its writer. Error(kCorrupt)
// when the two contradict one another.
void attach_checksums(Metadata& metadata, const Manifest& manifest);

}  // namespace tilestone
