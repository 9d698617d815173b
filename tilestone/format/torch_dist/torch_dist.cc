#include "tilestone/format/torch_dist/torch_dist.h"

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/number_text.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/archive/archive_writer_internal.h"
#include "tilestone/format/archive/zip_writer_internal.h"
#include "tilestone/format/archive/zstd_internal.h"
#include "tilestone/format/torch_dist/metadata_reader_internal.h"
#include "tilestone/format/torch_dist/metadata_writer_internal.h"

namespace tilestone {
namespace torch_dist {
namespace {

constexpr const char* kMetadataName = ".metadata";

// Items up to kWholeItem bytes are read whole to learn their structure. Of larger items, only the
// head and the tail are read. In items from stock torch, the structure is in 1 KiB of each; with a
// storage alignment of one page, in 24 KiB of the head.
constexpr uint64_t kWholeItem = 64u << 10;  // bytes
constexpr uint64_t kHeadProbe = 32u << 10;  // bytes
constexpr uint64_t kTailProbe = 4u << 10;   // bytes

// The rank of a rank-local metadata file, "__RANK.metadata".
std::optional<uint32_t> rank_of(std::string_view name) {
  constexpr std::string_view kPrefix = "__";
  constexpr std::string_view kSuffix = ".metadata";
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  if (name.size() <= kPrefix.size() + kSuffix.size()) return std::nullopt;
  const std::string_view digits =
      name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  const auto rank = number_in<uint32_t>(digits);
  return rank && std::to_string(*rank) == digits ? rank : std::nullopt;
}

std::string rank_local_name(uint32_t rank) { return "__" + std::to_string(rank) + ".metadata"; }

// The rank-local metadata files, by rank.
std::map<uint32_t, std::string> rank_local_by_rank(std::span<const std::string> names) {
  std::map<uint32_t, std::string> files;
  for (const std::string& name : names) {
    if (const auto rank = rank_of(name)) files.emplace(*rank, name);
  }
  return files;
}

Metadata parse_one(const DirectoryFiles& files, const std::string& name) {
  const auto found = files.contents.find(name);
  if (found == files.contents.end()) {
    throw Error(ErrorCode::kInternal, "a metadata file has not been read").with_file(name);
  }
  return with_file(name, [&] { return parse_metadata(found->second); });
}

Metadata parse_rank_local(const DirectoryFiles& files) {
  std::vector<Metadata> ranks;
  for (const auto& [rank, name] : rank_local_by_rank(files.names)) {
    if (rank != ranks.size()) {
      throw Error(ErrorCode::kCorrupt, "the rank-local checkpoint has a metadata file of rank " +
                                           std::to_string(rank) + " but none of rank " +
                                           std::to_string(ranks.size()))
          .with_file(rank_local_name(static_cast<uint32_t>(ranks.size())));
    }
    ranks.push_back(parse_one(files, name));
  }
  return merge_rank_local(std::move(ranks));
}

class Encoder final : public ItemEncoder {
 public:
  ItemRecipe tensor(const TensorItem& item, const Piece& piece, uint64_t file_offset) override {
    if (piece.data.bytes() !=
        static_cast<uint64_t>(piece.box.numel()) * itemsize(piece.data.dtype)) {
      throw Error(ErrorCode::kInternal, "a piece's data and box differ in size").with_key(item.key);
    }
    return archives_.recipe(piece, file_offset);
  }

  ItemRecipe object(const ObjectItem& item, uint64_t file_offset) override {
    ItemRecipe recipe = with_key(item.key, [&] { return archive::recipe_of_archive(item.value); });
    recipe.padding = -file_offset % archive::ZipWriter::kAlignment;
    return recipe;
  }

 private:
  archive::TensorArchives archives_;
};

class TorchDistFormat final : public Format {
 public:
  std::string_view name() const override { return "torch_dist"; }

  // The format can hold every dtype and shape, and the dialects check objects.
  void check(const Items&) const override {}

  std::unique_ptr<ItemEncoder> encoder() const override { return std::make_unique<Encoder>(); }

  Index encode_index(const Metadata& metadata) const override {
    return {{kMetadataName, write_metadata(metadata), IndexRole::kSwitch}};
  }

  bool detect(std::span<const std::string> names) const override {
    return contains_name(names, kMetadataName) || !rank_local_by_rank(names).empty();
  }

  std::vector<std::string> index_files(std::span<const std::string> names) const override {
    std::vector<std::string> found = rank_local_files(names);
    if (contains_name(names, kMetadataName)) found.emplace_back(kMetadataName);
    if (!found.empty()) return found;
    throw Error(ErrorCode::kNotFound, "no torch_dist checkpoint in the directory")
        .with_file(kMetadataName);
  }

  std::vector<std::string> rank_local_files(std::span<const std::string> names) const override {
    std::vector<std::string> found;
    for (const auto& [rank, name] : rank_local_by_rank(names)) found.push_back(name);
    return found;
  }

  std::string rank_index_name(int rank) const override {
    return rank_local_name(static_cast<uint32_t>(rank));
  }

  Bytes encode_rank_index(const Metadata& metadata) const override {
    return write_metadata(metadata);
  }

  Metadata parse_rank_index(const DirectoryFiles& files, int rank) const override {
    Metadata metadata = parse_one(files, rank_index_name(rank));
    metadata.rank_local = true;
    metadata.index();
    return metadata;
  }

  Metadata parse_index(const DirectoryFiles& files) const override {
    const std::vector<std::string> names = index_files(files.names);
    Metadata metadata;
    if (names.back() != kMetadataName) {
      metadata = parse_rank_local(files);
    } else if (names.size() == 1) {
      metadata = parse_one(files, kMetadataName);
    } else {
      refuse_two_modes(names.front());
    }
    metadata.index();
    return metadata;
  }

  std::vector<ProbeRange> probe(const ItemLocation& at) const override {
    if (at.codec != Codec::kNone || at.length <= kWholeItem) return {{0, at.length}};
    return {{0, kHeadProbe}, {at.length - kTailProbe, kTailProbe}};
  }

  StoredPayload parse_tensor(const StoredTensor&, const StoredChunk&, const ItemLocation& at,
                             std::span<const ByteView> probed) const override {
    if (auto payload = archive::locate_tensor(item_bytes(at, probed))) return *payload;
    throw Error(ErrorCode::kUnsupported,
                "torch.save archive: the first " + std::to_string(kHeadProbe) + " and the last " +
                    std::to_string(kTailProbe) + " of its " + std::to_string(at.length) +
                    " bytes don't contain its whole structure");
  }

  Value parse_object(const SharedBytes& item) const override { return archive::read_archive(item); }

  Bytes decode(Codec codec, ByteView item, uint64_t max_size) const override {
    if (codec == Codec::kZstd) return archive::zstd_decompress(item, max_size);
    throw Error(ErrorCode::kInternal, "decode() was called for an item without a codec");
  }

  std::optional<ItemFault> verify_tensor(const StoredTensor&, const StoredChunk&,
                                         ByteView item) const override {
    return verify_object(item);
  }

  std::optional<ItemFault> verify_object(ByteView item) const override {
    return archive::find_fault(item);
  }

 private:
  // It is unknown which of the two is newer. Stock torch silently reads .metadata, even if it is
  // the older one.
  [[noreturn]] static void refuse_two_modes(const std::string& rank_local) {
    throw Error(ErrorCode::kCorrupt,
                "the directory has both .metadata and " + rank_local +
                    " (of a rank-local checkpoint): it is unknown to which of the two checkpoints "
                    "the data files belong")
        .with_file(kMetadataName)
        .with_hint("remove either .metadata or all __RANK.metadata files, whichever is older");
  }

  archive::ItemBytes item_bytes(const ItemLocation& at, std::span<const ByteView> probed) const {
    if (at.codec != Codec::kNone && probed.size() == 1) return archive::ItemBytes(probed[0]);
    const std::vector<ProbeRange> ranges = probe(at);
    std::vector<archive::ItemBytes::Range> parts;
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (i >= probed.size() || probed[i].size() != ranges[i].size) {
        throw Error(ErrorCode::kInternal, "the probed bytes don't match the ranges of probe()");
      }
      parts.push_back({ranges[i].offset, probed[i]});
    }
    return {at.length, std::move(parts)};
  }
};

}  // namespace
}  // namespace torch_dist

std::shared_ptr<const Format> torch_dist_format() {
  return std::make_shared<torch_dist::TorchDistFormat>();
}

}  // namespace tilestone
