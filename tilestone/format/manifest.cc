#include "tilestone/format/manifest.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/base/named_fields.h"

namespace tilestone {
namespace {

// Bytes of docs/formats/manifest.md.
constexpr std::string_view kMagic = "TILEMAN\n";
constexpr uint32_t kFormatVersion = 2;
constexpr uint64_t kChecksumSize = 8;
constexpr size_t kLongestSaveId = 200;
constexpr std::string_view kAttributes = "attributes";
constexpr uint64_t kSmallestSum = 18;  // bytes of an encoded IndexSum

[[noreturn]] void corrupt(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "manifest: " + problem);
}

int to_int(uint64_t value, const ByteReader& reader) {
  if (value > static_cast<uint64_t>(std::numeric_limits<int>::max())) {
    reader.fail("a world size beyond every machine");
  }
  return static_cast<int>(value);
}

IndexSum decode_sum(ByteReader& reader) {
  IndexSum sum;
  sum.name = reader.string();
  sum.size = reader.u64();
  sum.xxh3 = reader.u64();
  const uint8_t role = reader.u8();
  if (role > static_cast<uint8_t>(IndexRole::kAfter)) reader.fail("an unknown role of a file");
  sum.role = static_cast<IndexRole>(role);
  return sum;
}

Bytes encode_attributes(const std::map<std::string, std::string>& attributes) {
  ByteWriter out;
  out.varint(attributes.size());
  for (const auto& [name, value] : attributes) {
    out.string(name);
    out.string(value);
  }
  return std::move(out).take();
}

std::map<std::string, std::string> decode_attributes(ByteView bytes) {
  ByteReader reader(bytes, "manifest: attributes");
  std::map<std::string, std::string> attributes;
  for (uint64_t left = reader.count(2); left > 0; --left) {
    std::string name(reader.string());
    if (!attributes.empty() && name <= attributes.rbegin()->first) {
      reader.fail("their names do not ascend");
    }
    attributes.emplace_hint(attributes.end(), std::move(name), reader.string());
  }
  reader.expect_end();
  return attributes;
}

Manifest decode_body(ByteReader& reader) {
  Manifest manifest;
  manifest.save_id = reader.string();
  manifest.world_size = to_int(reader.varint(), reader);
  manifest.format = reader.string();
  manifest.dialect = reader.string();
  manifest.writer = reader.string();
  for (uint64_t left = reader.count(kSmallestSum); left > 0; --left) {
    manifest.index.push_back(decode_sum(reader));
  }
  const uint64_t count = reader.count();
  if (count != static_cast<uint64_t>(manifest.world_size)) {
    reader.fail("found " + std::to_string(count) + " reports, expected one for each of " +
                std::to_string(manifest.world_size) + " ranks");
  }
  manifest.reports.reserve(count);
  for (uint64_t rank = 0; rank < count; ++rank) {
    manifest.reports.push_back(RankReport::decode(reader.blob()));
    const RankReport& report = manifest.reports.back();
    if (static_cast<uint64_t>(report.rank) != rank || report.world_size != manifest.world_size ||
        report.save_id != manifest.save_id) {
      reader.fail("report " + std::to_string(rank) + " is of another rank or save");
    }
  }
  read_named_fields(reader, [&](std::string_view name, ByteView value) {
    if (name == kAttributes) manifest.attributes = decode_attributes(value);
  });
  return manifest;
}

// What the manifest says of one item.
struct Entry {
  const ReportedItem* item = nullptr;
  const std::string* key = nullptr;
  const Box* box = nullptr;  // null: an object
};

// The manifest's items by the metadata's file index and the offset in the file.
class ItemIndex {
 public:
  ItemIndex(const Metadata& metadata, const Manifest& manifest) {
    for (uint32_t i = 0; i < metadata.files.size(); ++i) files_.emplace(metadata.files[i], i);
    by_file_.resize(metadata.files.size());
    for (const RankReport& report : manifest.reports) add(report);
    const auto before = [](const Entry& a, const Entry& b) {
      return a.item->offset < b.item->offset;
    };
    for (auto& entries : by_file_) {
      if (!std::is_sorted(entries.begin(), entries.end(), before)) {
        std::sort(entries.begin(), entries.end(), before);
      }
    }
  }

  const Entry* find(const ItemLocation& at) {
    const std::vector<Entry>& entries = by_file_[at.file];
    // Neighbours in the metadata are mostly neighbours in the file.
    auto found = entries.begin() + static_cast<ptrdiff_t>(std::min(next_, entries.size()));
    if (found == entries.end() || found->item->offset != at.offset) {
      found = std::lower_bound(
          entries.begin(), entries.end(), at.offset,
          [](const Entry& entry, uint64_t offset) { return entry.item->offset < offset; });
    }
    next_ = static_cast<size_t>(found - entries.begin()) + 1;
    return found != entries.end() && found->item->offset == at.offset ? &*found : nullptr;
  }

 private:
  void add(const RankReport& report) {
    for (const RankReport::Chunk& chunk : report.chunks) {
      add(report, {&chunk.at, &report.tensors[chunk.tensor].key, &chunk.box});
    }
    for (const RankReport::Object& object : report.objects) {
      add(report, {&object.at, &object.key, nullptr});
    }
  }
  void add(const RankReport& report, const Entry& entry) {
    const std::string& name = report.files[entry.item->file].name;
    const auto file = files_.find(name);
    if (file == files_.end()) {
      throw Error(ErrorCode::kCorrupt, "manifest: it names a file that the metadata does not")
          .with_key(*entry.key)
          .with_file(name);
    }
    by_file_[file->second].push_back(entry);
  }

  std::unordered_map<std::string_view, uint32_t> files_;
  std::vector<std::vector<Entry>> by_file_;
  size_t next_ = 0;  // after the last one found
};

void attach(const Metadata& metadata, ItemIndex& index, const std::string& key, const Box* box,
            ItemLocation& at) {
  const Entry* entry = index.find(at);
  const bool same = entry != nullptr && *entry->key == key && entry->item->length == at.length &&
                    (entry->box != nullptr) == (box != nullptr) &&
                    (box == nullptr || *entry->box == *box);
  if (!same) {
    throw Error(ErrorCode::kCorrupt, "manifest: it contradicts the metadata about the item at " +
                                         std::to_string(at.offset) + " of " +
                                         std::to_string(at.length) + " bytes")
        .with_key(key)
        .with_file(metadata.files[at.file]);
  }
  at.checksums = entry->item->checksums;
}

size_t items_of(const Metadata& metadata) {
  size_t items = metadata.objects.size();
  for (const StoredTensor& tensor : metadata.tensors) items += tensor.chunks.size();
  return items;
}

size_t items_of(const Manifest& manifest) {
  size_t items = 0;
  for (const RankReport& report : manifest.reports) {
    items += report.chunks.size() + report.objects.size();
  }
  return items;
}

}  // namespace

Bytes Manifest::encode() const {
  std::vector<Bytes> encoded;
  for (const RankReport& report : reports) encoded.push_back(report.encode());
  return encode(encoded);
}

Bytes Manifest::encode(std::span<const Bytes> encoded_reports) const {
  ByteWriter out;
  out.raw(as_bytes(kMagic));
  out.u32(kFormatVersion);
  out.string(save_id);
  out.varint(static_cast<uint64_t>(world_size));
  out.string(format);
  out.string(dialect);
  out.string(writer);
  out.varint(index.size());
  for (const IndexSum& sum : index) {
    out.string(sum.name);
    out.u64(sum.size);
    out.u64(sum.xxh3);
    out.u8(static_cast<uint8_t>(sum.role));
  }
  out.varint(encoded_reports.size());
  for (const Bytes& report : encoded_reports) out.blob(report);
  if (!attributes.empty()) {
    write_named_fields(out, {{std::string(kAttributes), encode_attributes(attributes)}});
  }
  out.u64(xxh3_64(out.bytes()));
  return std::move(out).take();
}

Manifest Manifest::decode(ByteView bytes, const std::string& file) {
  try {
    if (bytes.size() < kMagic.size() + sizeof(uint32_t) + kChecksumSize) {
      corrupt("it has only " + std::to_string(bytes.size()) + " bytes");
    }
    if (as_text(bytes.first(kMagic.size())) != kMagic) corrupt("it does not start as one");
    const ByteView body = bytes.first(bytes.size() - kChecksumSize);
    ByteReader checksum(bytes.last(kChecksumSize), "manifest checksum");
    if (checksum.u64() != xxh3_64(body)) corrupt("its checksum does not match its bytes");
    ByteReader reader(body, "manifest");
    reader.raw(kMagic.size());
    const uint32_t version = reader.u32();
    if (version != kFormatVersion) {
      throw Error(ErrorCode::kUnsupported, "manifest: version " + std::to_string(version) +
                                               "; only version " + std::to_string(kFormatVersion) +
                                               " is known here");
    }
    return decode_body(reader);
  } catch (Error& error) {
    error.with_file(file);
    throw;
  }
}

std::string manifest_name(std::string_view save_id) {
  return ".tilestone/" + std::string(save_id) + ".manifest";
}

bool may_have_manifest(std::string_view save_id) {
  return !save_id.empty() && save_id.size() <= kLongestSaveId && save_id != "." &&
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
      throw Error(ErrorCode::kCorrupt, "a file that describes the checkpoint is missing")
          .with_file(sum.name);
    }
    const Bytes& bytes = found->second;
    if (sum.size == bytes.size() && sum.xxh3 == xxh3_64(bytes)) continue;
    throw Error(ErrorCode::kCorrupt, "the file is not what its save wrote: expected " +
                                         std::to_string(sum.size) + " bytes of XXH3 " +
                                         std::to_string(sum.xxh3) + ", found " +
                                         std::to_string(bytes.size()) + " bytes of XXH3 " +
                                         std::to_string(xxh3_64(bytes)))
        .with_file(sum.name);
  }
}

void attach_checksums(Metadata& metadata, const Manifest& manifest) {
  ItemIndex index(metadata, manifest);
  for (StoredTensor& tensor : metadata.tensors) {
    for (StoredChunk& chunk : tensor.chunks) {
      attach(metadata, index, tensor.key, &chunk.box, chunk.at);
    }
  }
  for (StoredObject& object : metadata.objects) {
    attach(metadata, index, object.key, nullptr, object.at);
  }
  if (items_of(metadata) != items_of(manifest)) {
    corrupt("it has " + std::to_string(items_of(manifest)) + " items, the metadata " +
            std::to_string(items_of(metadata)));
  }
  metadata.writer = manifest.writer;
}

}  // namespace tilestone
