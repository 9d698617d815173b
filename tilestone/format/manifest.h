// The commit manifest: one file with the receipts of all ranks, beside the format's own index. It
// holds what that index has no place for: checksums of whole items, payload offsets, file sizes.
// docs/formats/manifest.md specifies the file format.
//
// The manifest's file name contains the save id, which torch_dist's index names too. The one rename
// that publishes the index therefore switches both at once, and the manifest of another save is
// never used. zarr's index names no save id; there, the only manifest in the directory is used, and
// its sums of the index must match.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tilestone/format/index.h"
#include "tilestone/plan/receipt.h"

namespace tilestone {

// Size and checksum of an index file as it was published.
struct IndexSum {
  std::string name;
  uint64_t size = 0;  // bytes
  uint64_t xxh3 = 0;  // of the file's bytes
  IndexRole role = IndexRole::kSwitch;
  friend bool operator==(const IndexSum&, const IndexSum&) = default;
};

// What a manifest records about the checkpoint as a whole.
struct ManifestHead {
  std::string save_id;
  int world_size = 1;
  std::string format;           // "torch_dist"
  std::string dialect;          // "pytorch"
  std::string writer;           // "Tilestone 0.1.0"
  std::vector<IndexSum> index;  // in the order of publishing
  // Given by the caller of the save.
  std::map<std::string, std::string> attributes = {};
  // Data files that still contain bytes of items that were removed from the checkpoint.
  std::set<std::string> remains = {};
};

struct Manifest : ManifestHead {
  std::vector<Receipt> receipts;  // by rank

  Bytes encode() const;
  // The same for receipts that Receipt::encode() has already encoded, by rank. Ignores `receipts`.
  Bytes encode(std::span<const Bytes> encoded_receipts) const;
  // Decodes every supported version. Error(kCorrupt); kUnsupported for another version. `file` is
  // named in errors, here and below.
  static Manifest decode(ByteView bytes, const std::string& file);
};

// The head alone, for who wants no receipt. `start`: at least the first kManifestStart bytes, or
// the whole file. Returns how many bytes of the file decode_manifest_head() takes; of a version
// without a head of its own UINT64_MAX, for the whole file.
inline constexpr uint64_t kManifestStart = 20;
uint64_t manifest_head_bytes(ByteView start, const std::string& file);
ManifestHead decode_manifest_head(ByteView bytes, const std::string& file);

// The head, and where each rank's receipt is, for who wants one receipt.
struct ManifestTable {
  ManifestHead head;
  struct Range {
    uint64_t offset = 0;  // in the file, bytes
    uint64_t size = 0;    // bytes
    uint64_t xxh3 = 0;    // of the receipt's bytes
  };
  std::vector<Range> receipts;  // by rank
};
// `head`: the first manifest_head_bytes() bytes. Error(kUnsupported) for a version without a table.
ManifestTable decode_manifest_table(ByteView head, const std::string& file);
// `bytes`: those of the rank's range.
Receipt receipt_in(const ManifestTable& table, size_t rank, ByteView bytes,
                   const std::string& file);

std::string manifest_name(std::string_view save_id);  // ".tilestone/SAVE_ID.manifest"
// False for a save id that can't be part of a file name; another program's metadata may name one.
bool may_have_manifest(std::string_view save_id);

std::vector<IndexSum> sums_of(const Index& index);
// Compares the index files with their sums in the manifest. Error(kCorrupt), naming the file, if a
// file has changed, or if the switch or a file published before it is missing.
void check_index(const Manifest& manifest, const DirectoryFiles& files);

// Adds to `metadata` what the index does not contain: the items' checksums, the writer, attributes,
// copies and their files, and paths if the format's index has none. Metadata::index() must have
// been called. Error(kCorrupt) if the manifest contradicts the metadata.
void attach_manifest(Metadata& metadata, const Manifest& manifest);

}  // namespace tilestone
