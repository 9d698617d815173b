#include "tilestone/format/manifest.h"

#include <utility>

#include "tilestone/base/both_ways.h"
#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/named_fields.h"

namespace tilestone {
namespace {

// Constants of the file format (docs/formats/manifest.md).
constexpr std::string_view kMagic = "TILEMAN\n";
constexpr uint32_t kFormatVersion = 3;
constexpr uint32_t kWithoutTable = 2;  // an earlier version without a table of receipts
constexpr uint64_t kChecksumSize = 8;
constexpr size_t kMaxSaveIdSize = 200;
constexpr std::string_view kAttributes = "attributes";
constexpr std::string_view kRemains = "remains";
constexpr uint64_t kSmallestSum = 18;   // bytes of an encoded IndexSum
constexpr uint64_t kSmallestRange = 9;  // bytes of an encoded ManifestTable::Range

[[noreturn]] void corrupt(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "manifest: " + problem);
}

// The fields from the save id to the sums of the index, as in base/both_ways.h.
void walk_first_fields(auto& io, auto& head) {
  both::text(io, head.save_id);
  both::varint(io, head.world_size);
  both::text(io, head.format);
  both::text(io, head.dialect);
  both::text(io, head.writer);
  both::each(io, head.index, kSmallestSum, [&](auto& sum) {
    both::text(io, sum.name);
    both::u64(io, sum.size);
    both::u64(io, sum.xxh3);
    both::one_of(io, sum.role, IndexRole::kAfter, "an index file has an unknown role");
  });
}

uint32_t version_of(ByteView bytes) {
  if (bytes.size() < kManifestStart) {
    corrupt("the file has only " + std::to_string(bytes.size()) + " bytes");
  }
  if (as_text(bytes.first(kMagic.size())) != kMagic) {
    corrupt("the file does not start with the magic bytes of a manifest");
  }
  ByteReader reader(bytes.subspan(kMagic.size()), "manifest");
  const uint32_t version = reader.u32();
  if (version == kFormatVersion || version == kWithoutTable) return version;
  throw Error(ErrorCode::kUnsupported, "manifest: version " + std::to_string(version) +
                                           " is not supported; this program reads versions " +
                                           std::to_string(kWithoutTable) + " and " +
                                           std::to_string(kFormatVersion));
}

// Checks the checksum that ends `bytes` and returns a reader of what precedes it, from `begin` on.
ByteReader checked_body(ByteView bytes, uint64_t begin) {
  const ByteView body = bytes.first(bytes.size() - kChecksumSize);
  ByteReader checksum(bytes.last(kChecksumSize), "manifest checksum");
  if (checksum.u64() != xxh3_64(body)) corrupt("the checksum does not match the bytes");
  ByteReader reader(body, "manifest");
  reader.raw(begin);
  return reader;
}

void decode_optional_fields(ByteReader& reader, ManifestHead& head) {
  read_named_fields(reader, [&](std::string_view name, ByteView value) {
    ByteReader field(value, "manifest: " + std::string(name));
    if (name == kAttributes) {
      both::text_map(field, head.attributes);
    } else if (name == kRemains) {
      both::texts(field, head.remains);
    } else {
      return;  // from a later version
    }
    field.expect_end();
  });
}

uint64_t read_count(ByteReader& reader, const ManifestHead& head, uint64_t smallest) {
  const uint64_t count = reader.count(smallest);
  if (count != static_cast<uint64_t>(head.world_size)) {
    reader.fail("expected one receipt for each of " + std::to_string(head.world_size) +
                " ranks, found " + std::to_string(count) + " receipts");
  }
  return count;
}

Receipt receipt_of(const ManifestHead& head, uint64_t rank, ByteView bytes) {
  Receipt receipt = Receipt::decode(bytes);
  if (static_cast<uint64_t>(receipt.rank) != rank || receipt.world_size != head.world_size ||
      receipt.save_id != head.save_id) {
    corrupt("the receipt in the place of rank " + std::to_string(rank) +
            " belongs to another rank, world size or save");
  }
  return receipt;
}

Manifest decode_without_table(ByteView bytes) {
  ByteReader reader = checked_body(bytes, kMagic.size() + sizeof(uint32_t));
  Manifest manifest;
  walk_first_fields(reader, manifest);
  const uint64_t count = read_count(reader, manifest, 1);
  manifest.receipts.reserve(count);
  for (uint64_t rank = 0; rank < count; ++rank) {
    manifest.receipts.push_back(receipt_of(manifest, rank, reader.blob()));
  }
  decode_optional_fields(reader, manifest);
  return manifest;
}

ManifestTable decode_head(ByteView head) {
  ByteReader reader = checked_body(head, kManifestStart);
  ManifestTable table;
  walk_first_fields(reader, table.head);
  const uint64_t count = read_count(reader, table.head, kSmallestRange);
  table.receipts.reserve(count);
  uint64_t offset = head.size();
  for (uint64_t rank = 0; rank < count; ++rank) {
    const uint64_t size = reader.varint();
    table.receipts.push_back({offset, size, reader.u64()});
    const auto end = try_add(offset, size);
    if (!end) reader.fail("the end of a receipt exceeds 64 bits");
    offset = *end;
  }
  decode_optional_fields(reader, table.head);
  return table;
}

// `start`: the first bytes of a manifest with a table of receipts.
uint64_t head_bytes(ByteView start) {
  ByteReader reader(start.subspan(kMagic.size() + sizeof(uint32_t)), "manifest");
  const uint64_t bytes = reader.u64();
  if (bytes < kManifestStart + kChecksumSize) corrupt("the recorded size of the head is too small");
  return bytes;
}

Receipt decode_receipt(const ManifestTable& table, size_t rank, ByteView bytes) {
  const ManifestTable::Range& range = table.receipts.at(rank);
  if (bytes.size() != range.size || xxh3_64(bytes) != range.xxh3) {
    corrupt("the receipt of rank " + std::to_string(rank) + " does not match its checksum");
  }
  return receipt_of(table.head, rank, bytes);
}

Manifest decode_with_table(ByteView bytes) {
  const uint64_t head_size = head_bytes(bytes);
  if (head_size > bytes.size()) corrupt("the file ends within its head");
  ManifestTable table = decode_head(bytes.first(head_size));
  const uint64_t end = table.receipts.empty()
                           ? head_size
                           : table.receipts.back().offset + table.receipts.back().size;
  if (end != bytes.size()) {
    corrupt("expected " + std::to_string(end) + " bytes, found " + std::to_string(bytes.size()));
  }
  Manifest manifest{table.head, {}};
  manifest.receipts.reserve(table.receipts.size());
  for (size_t rank = 0; rank < table.receipts.size(); ++rank) {
    const ManifestTable::Range& range = table.receipts[rank];
    manifest.receipts.push_back(
        decode_receipt(table, rank, bytes.subspan(range.offset, range.size)));
  }
  return manifest;
}

}  // namespace

Bytes Manifest::encode() const {
  std::vector<Bytes> encoded;
  for (const Receipt& receipt : receipts) encoded.push_back(receipt.encode());
  return encode(encoded);
}

Bytes Manifest::encode(std::span<const Bytes> encoded_receipts) const {
  ByteWriter fields;
  walk_first_fields(fields, *this);
  fields.varint(encoded_receipts.size());
  uint64_t receipt_bytes = 0;
  for (const Bytes& receipt : encoded_receipts) {
    fields.varint(receipt.size());
    fields.u64(xxh3_64(receipt));
    receipt_bytes += receipt.size();
  }
  std::vector<NamedField> optional;
  const auto add = [&](std::string_view name, const auto& walk) {
    ByteWriter field;
    walk(field);
    optional.emplace_back(name, std::move(field).take());
  };
  if (!attributes.empty()) add(kAttributes, [&](auto& io) { both::text_map(io, attributes); });
  if (!remains.empty()) add(kRemains, [&](auto& io) { both::texts(io, remains); });
  write_named_fields(fields, optional);
  ByteWriter out;
  const uint64_t head_size = kManifestStart + fields.size() + kChecksumSize;
  out.reserve(head_size + receipt_bytes);
  out.raw(as_bytes(kMagic));
  out.u32(kFormatVersion);
  out.u64(head_size);
  out.raw(fields.bytes());
  out.u64(xxh3_64(out.bytes()));
  for (const Bytes& receipt : encoded_receipts) out.raw(receipt);
  return std::move(out).take();
}

Manifest Manifest::decode(ByteView bytes, const std::string& file) {
  return with_file(file, [&] {
    return version_of(bytes) == kWithoutTable ? decode_without_table(bytes)
                                              : decode_with_table(bytes);
  });
}

uint64_t manifest_head_bytes(ByteView start, const std::string& file) {
  return with_file(
      file, [&] { return version_of(start) == kWithoutTable ? UINT64_MAX : head_bytes(start); });
}

ManifestHead decode_manifest_head(ByteView bytes, const std::string& file) {
  return with_file(file, [&]() -> ManifestHead {
    if (version_of(bytes) == kWithoutTable) return decode_without_table(bytes);
    return decode_head(bytes).head;
  });
}

ManifestTable decode_manifest_table(ByteView head, const std::string& file) {
  return with_file(file, [&] {
    if (version_of(head) != kWithoutTable) return decode_head(head);
    throw Error(ErrorCode::kUnsupported, "manifest: version 2 has no table of receipts");
  });
}

Receipt receipt_in(const ManifestTable& table, size_t rank, ByteView bytes,
                   const std::string& file) {
  return with_file(file, [&] { return decode_receipt(table, rank, bytes); });
}

std::string manifest_name(std::string_view save_id) {
  return ".tilestone/" + std::string(save_id) + ".manifest";
}

bool may_have_manifest(std::string_view save_id) {
  return !save_id.empty() && save_id.size() <= kMaxSaveIdSize && save_id != "." &&
         save_id != ".." && save_id.find('/') == std::string_view::npos &&
         save_id.find('\0') == std::string_view::npos;
}

std::vector<IndexSum> sums_of(const Index& index) {
  std::vector<IndexSum> sums;
  for (const IndexFile& file : index) {
    sums.push_back({file.name, file.bytes.size(), xxh3_64(file.bytes), file.role});
  }
  return sums;
}

void check_index(const Manifest& manifest, const DirectoryFiles& files) {
  for (const IndexSum& sum : manifest.index) {
    const auto found = files.contents.find(sum.name);
    if (found == files.contents.end()) {
      if (sum.role == IndexRole::kAfter) continue;
      throw Error(ErrorCode::kCorrupt, "a file of the checkpoint's index is missing")
          .with_file(sum.name);
    }
    const Bytes& bytes = found->second;
    if (sum.size == bytes.size() && sum.xxh3 == xxh3_64(bytes)) continue;
    throw Error(ErrorCode::kCorrupt, "the file has changed since it was saved: expected " +
                                         std::to_string(sum.size) + " bytes with XXH3 " +
                                         std::to_string(sum.xxh3) + ", found " +
                                         std::to_string(bytes.size()) + " bytes with XXH3 " +
                                         std::to_string(xxh3_64(bytes)))
        .with_file(sum.name);
  }
}

}  // namespace tilestone
