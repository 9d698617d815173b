#include "tilestone/format/torch_dist/torch_dist.h"

#include <charconv>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/torch_dist/archive_reader_internal.h"
#include "tilestone/format/torch_dist/archive_writer_internal.h"
#include "tilestone/format/torch_dist/dialect_internal.h"
#include "tilestone/format/torch_dist/metadata_reader_internal.h"
#include "tilestone/format/torch_dist/metadata_writer_internal.h"
#include "tilestone/format/torch_dist/pickle_reader_internal.h"
#include "tilestone/format/torch_dist/value_check_internal.h"
#include "tilestone/format/torch_dist/value_reader_internal.h"
#include "tilestone/format/torch_dist/zip_writer_internal.h"
#include "tilestone/format/torch_dist/zstd_internal.h"

namespace tilestone {
namespace torch_dist {
namespace {

constexpr const char* kMetadataName = ".metadata";
constexpr uint64_t kMaxMetadataSize = 0xffffffff;

// Items up to this size are read whole to learn their structure; of larger ones, so much of the
// head and tail. Stock torch needs 1 KiB of each; with its storage alignment set to a page, 24 KiB
// of the head.
constexpr uint64_t kWholeItem = 64u << 10;
constexpr uint64_t kHeadProbe = 32u << 10;
constexpr uint64_t kTailProbe = 4u << 10;

// The rank of a rank-local metadata file, "__RANK.metadata".
std::optional<uint32_t> rank_of(std::string_view name) {
  constexpr std::string_view kPrefix = "__";
  constexpr std::string_view kSuffix = ".metadata";
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  if (name.size() <= kPrefix.size() + kSuffix.size()) return std::nullopt;
  const std::string_view digits =
      name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  uint32_t rank = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return std::to_string(rank) == digits ? std::optional(rank) : std::nullopt;
}

// The rank-local metadata files, by rank.
std::map<uint32_t, std::string> rank_local_files(Storage& storage) {
  std::map<uint32_t, std::string> files;
  for (std::string& name : storage.list("__")) {
    if (const auto rank = rank_of(name)) files.emplace(*rank, std::move(name));
  }
  return files;
}

Metadata read_one(Storage& storage, const std::string& name) {
  try {
    return parse_metadata(read_file(storage, name, kMaxMetadataSize));
  } catch (Error& error) {
    error.with_file(name);
    throw;
  }
}

Metadata read_rank_local(Storage& storage) {
  std::vector<Metadata> ranks;
  for (const auto& [rank, name] : rank_local_files(storage)) {
    if (rank != ranks.size()) {
      throw Error(ErrorCode::kCorrupt, "a rank-local checkpoint with metadata of rank " +
                                           std::to_string(rank) + " lacks that of rank " +
                                           std::to_string(ranks.size()))
          .with_file("__" + std::to_string(ranks.size()) + ".metadata");
    }
    ranks.push_back(read_one(storage, name));
  }
  return merge_rank_local(std::move(ranks));
}

class Encoder final : public ItemEncoder {
 public:
  ItemRecipe tensor(const std::string& key, const Piece& piece, uint64_t file_offset) override {
    if (piece.data.bytes() !=
        static_cast<uint64_t>(piece.box.numel()) * itemsize(piece.data.dtype)) {
      throw Error(ErrorCode::kInternal, "a piece whose data is not of its box's size")
          .with_key(key);
    }
    return archives_.recipe(piece, file_offset);
  }

  ItemRecipe object(const std::string& key, const Value& value, uint64_t file_offset) override {
    Literal literal;
    try {
      literal.bytes = write_archive(value);
    } catch (Error& error) {
      error.with_key(key);
      throw;
    }
    ItemRecipe recipe;
    recipe.padding = -file_offset % ZipWriter::kAlignment;
    recipe.length = literal.bytes.size();
    recipe.segments.push_back(
        {recipe.length, std::make_shared<const Literal>(std::move(literal)), nullptr});
    return recipe;
  }

 private:
  TensorArchives archives_;
};

class TorchDistFormat final : public Format {
 public:
  std::string_view name() const override { return "torch_dist"; }

  Items to_items(const StateDict& state) const override { return torch_dist::to_items(state); }
  StateDict from_items(const StateDict& original, const Items& loaded) const override {
    return torch_dist::from_items(original, loaded);
  }

  // The save id in front keeps attempts apart; stock readers go by the names in the metadata, and
  // what follows is the name that stock writers give.
  std::string data_file_name(std::string_view save_id, int rank, int index) const override {
    return std::string(save_id) + "__" + std::to_string(rank) + "_" + std::to_string(index) +
           ".distcp";
  }

  std::unique_ptr<ItemEncoder> encoder() const override { return std::make_unique<Encoder>(); }

  std::string metadata_name() const override { return kMetadataName; }
  Bytes encode_metadata(const Metadata& metadata) const override {
    return write_metadata(metadata);
  }

  bool detect(Storage& storage) const override {
    return storage.stat(kMetadataName) || !rank_local_files(storage).empty();
  }

  std::vector<std::string> metadata_files(Storage& storage) const override {
    std::vector<std::string> names;
    for (const auto& [rank, name] : rank_local_files(storage)) names.push_back(name);
    if (storage.stat(kMetadataName)) names.emplace_back(kMetadataName);
    if (!names.empty()) return names;
    throw Error(ErrorCode::kNotFound, "no torch_dist checkpoint in " + storage.describe())
        .with_file(kMetadataName);
  }

  Metadata read_metadata(Storage& storage) const override {
    const std::vector<std::string> names = metadata_files(storage);
    Metadata metadata;
    if (names.back() != kMetadataName) {
      metadata = read_rank_local(storage);
    } else if (names.size() == 1) {
      metadata = read_one(storage, kMetadataName);
    } else {
      refuse_two_modes(names.front());
    }
    metadata.index();
    return metadata;
  }

  std::vector<ProbeRange> probe(const ItemLocation& at, bool tensor) const override {
    if (!tensor || at.codec != Codec::kNone || at.length <= kWholeItem) return {{0, at.length}};
    return {{0, kHeadProbe}, {at.length - kTailProbe, kTailProbe}};
  }

  StoredPayload parse_tensor(const ItemLocation& at,
                             std::span<const ByteView> probed) const override {
    if (auto payload = locate_tensor(item_bytes(at, probed))) return *payload;
    throw Error(ErrorCode::kUnsupported,
                "torch.save archive: its structure is in neither the first " +
                    std::to_string(kHeadProbe) + " nor the last " + std::to_string(kTailProbe) +
                    " of its " + std::to_string(at.length) + " bytes");
  }

  Value parse_object(ByteView item) const override { return read_archive(item); }

  Bytes decode(Codec codec, ByteView item, uint64_t max_size) const override {
    if (codec == Codec::kZstd) return zstd_decompress(item, max_size);
    throw Error(ErrorCode::kInternal, "decode() of an item without a codec");
  }

  std::optional<ItemFault> verify_item(ByteView item) const override {
    try {
      return check_archive(item);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kUnsafe) throw;
      return ItemFault{0, error.message()};
    }
  }

 private:
  // Which of the two is newer can't be known, and stock torch would silently take the one that
  // may be older.
  [[noreturn]] static void refuse_two_modes(const std::string& rank_local) {
    throw Error(ErrorCode::kCorrupt,
                "the directory holds a checkpoint's .metadata and a rank-local one's " +
                    rank_local + ": which of the two its data files belong to can't be known")
        .with_file(kMetadataName)
        .with_hint("remove .metadata or the __RANK.metadata files, whichever are older");
  }

  ItemBytes item_bytes(const ItemLocation& at, std::span<const ByteView> probed) const {
    if (at.codec != Codec::kNone && probed.size() == 1) return ItemBytes(probed[0]);
    const std::vector<ProbeRange> ranges = probe(at, true);
    std::vector<ItemBytes::Range> parts;
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (i >= probed.size() || probed[i].size() != ranges[i].size) {
        throw Error(ErrorCode::kInternal, "the bytes probed are not those of probe()");
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

Value read_torch_archive(ByteView bytes) { return torch_dist::read_archive(bytes); }

Value read_pickle(ByteView bytes) {
  using torch_dist::Pickle;
  return torch_dist::read_value(Pickle::parse(bytes, Pickle::Sizes::kCalls), {});
}

std::vector<std::string> classes_in(ByteView pickled, bool archive) {
  return torch_dist::classes_in_pickle(pickled, archive);
}

Bytes write_torch_archive(const Value& value) { return torch_dist::write_archive(value); }

}  // namespace tilestone
