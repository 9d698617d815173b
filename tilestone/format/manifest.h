// The commit manifest: every rank's report bound into one file, beside the format's own metadata.
// It holds what stock metadata can't: checksums of whole items, payload offsets, file sizes. The
// spec is docs/formats/manifest.md.
//
// The manifest's name holds the save id that the metadata file names, so the one rename that
// publishes the metadata switches both at once, and a manifest of another save is never taken.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/format/index.h"
#include "tilestone/plan/report.h"

namespace tilestone {

// What a file of the index was when it was published.
struct IndexSum {
  std::string name;
  uint64_t size = 0;  // bytes
  uint64_t xxh3 = 0;  // of its bytes
  IndexRole role = IndexRole::kSwitch;
  friend bool operator==(const IndexSum&, const IndexSum&) = default;
};

// What a manifest says of the checkpoint as a whole.
struct ManifestHead {
  std::string save_id;
  int world_size = 1;
  std::string format;           // "torch_dist"
  std::string dialect;          // "pytorch"
  std::string writer;           // "Tilestone 0.1.0"
  std::vector<IndexSum> index;  // in the order of publishing
  // What the caller of the save said of the checkpoint.
  std::map<std::string, std::string> attributes = {};
  // Data files in which bytes of items stay that were removed from the checkpoint.
  std::set<std::string> remains = {};
};

struct Manifest : ManifestHead {
  std::vector<RankReport> reports;  // by rank

  Bytes encode() const;
  // The same for reports that are at hand as RankReport::encode() gave them, by rank; `reports` is
  // not looked at.
  Bytes encode(std::span<const Bytes> encoded_reports) const;
  // Of any version. Error(kCorrupt), kUnsupported for a version that is not known.
  static Manifest decode(ByteView bytes, const std::string& file);
};

// ---- One rank's report alone, out of a large job's manifest

// How much of a manifest has to be read to know the size of its head.
inline constexpr uint64_t kManifestStart = 20;  // bytes

// A rank's report in the manifest.
struct ReportPlace {
  uint64_t offset = 0;  // bytes
  uint64_t size = 0;    // bytes
  uint64_t xxh3 = 0;    // of its bytes
};

struct ManifestTable {
  ManifestHead head;
  std::vector<ReportPlace> places;  // by rank
};

// Bytes of the head, from the manifest's first kManifestStart bytes. Error(kUnsupported) for a
// version without a table: such a manifest is read whole.
uint64_t manifest_head_bytes(ByteView start, const std::string& file);
// `head`: that many bytes. Error(kCorrupt) when they are not as they were written.
ManifestTable decode_manifest_head(ByteView head, const std::string& file);
// `bytes`: those at table.places[rank]. Error(kCorrupt) likewise.
RankReport decode_report(const ManifestTable& table, int rank, ByteView bytes,
                         const std::string& file);

std::string manifest_name(std::string_view save_id);  // ".tilestone/SAVE_ID.manifest"
// False for a save id, which another writer's metadata may name, that is part of no file's name.
bool may_have_manifest(std::string_view save_id);

std::vector<IndexSum> sums_of(const Index& index);
// Error(kCorrupt) naming the file when one that the manifest names as published before or at the
// switch is not there, or is another one.
void check_index(const Manifest& manifest, const DirectoryFiles& files);

// Adds what the index does not say to `metadata`, which is index()ed: checksums of the items, the
// writer, attributes, copies with their files, and the paths of an index that has no place for
// them. Error(kCorrupt) when the two contradict one another.
void attach_manifest(Metadata& metadata, const Manifest& manifest);

}  // namespace tilestone
