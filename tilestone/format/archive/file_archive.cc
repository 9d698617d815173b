#include "tilestone/format/archive/file_archive_internal.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/tensor_node_internal.h"
#include "tilestone/format/archive/value_reader_internal.h"
#include "tilestone/format/archive/zip_format_internal.h"
#include "tilestone/format/archive/zip_reader_internal.h"
#include "tilestone/state/value_children.h"

namespace tilestone::archive {
namespace {

constexpr uint64_t kFirstTail = 64u << 10;  // bytes
constexpr uint64_t kAlignment = 64;         // of records, as torch writes them, or a multiple of it
constexpr uint64_t kMaxExtra = UINT16_MAX;  // bytes of the fields before the record's own
constexpr size_t kMaxParts = 100;           // each is read by itself

ItemBytes bytes_of(const FileParts& read) {
  std::vector<ItemBytes::Range> ranges;
  for (const auto& [offset, bytes] : read.parts) ranges.push_back({offset, bytes});
  return {read.size, std::move(ranges)};
}

// Where the record's bytes begin: as its local header says, if that has been read. Reading it for
// each tensor takes too long, so otherwise it is where they must begin to end before what follows
// them and to be aligned. nullopt: several places are possible, or none.
std::optional<uint64_t> offset_of(const Archive& archive, const ItemBytes& item,
                                  const ZipRecord& record) {
  if (const auto offset = archive.directory().data_offset(item, record)) return offset;
  const bool has_descriptor = (record.flags & zip::kFlagDescriptor) != 0;
  const uint64_t least = record.header_offset + zip::kLocalHeaderSize + record.name.size();
  const uint64_t end = archive.end_of(record);
  std::optional<uint64_t> only;
  for (const uint64_t descriptor : {0, 16, 24}) {
    const uint64_t after = record.size + descriptor;
    if ((descriptor > 0) != has_descriptor || end < least + after) continue;
    const uint64_t begin = end - after;
    if (begin % kAlignment != 0 || begin - least > kMaxExtra) continue;
    if (only) return std::nullopt;
    only = begin;
  }
  return only;
}

}  // namespace

std::optional<ProbeRange> next_part(const FileParts& read) {
  const ItemBytes item = bytes_of(read);
  const auto file = read.parts.empty() ? std::nullopt : Archive::open(item);
  if (!file) {
    const uint64_t size = std::min(read.size, kFirstTail << (2 * read.parts.size()));
    return ProbeRange{read.size - size, size};
  }
  if (read.parts.size() > kMaxParts) {
    throw Error(ErrorCode::kUnsupported,
                "the records of the file are not aligned as torch.save does")
        .with_hint("load the file with torch.load, and save it again");
  }
  const ZipRecord* const byte_order = file->byte_order();
  for (const ZipRecord& record : file->directory().records()) {
    const uint64_t size = file->end_of(record) - record.header_offset;  // with its header
    ProbeRange range{record.header_offset, size};
    if (&record != &file->pickle() && &record != byte_order) {
      if (record.size == 0 || offset_of(*file, item, record)) continue;
      range.size -= record.size;
    }
    if (!item.find(range.offset, range.size)) return range;
  }
  return std::nullopt;
}

TensorView stand_in(FileTensor tensor, const Dims& shape) {
  static std::byte nothing{};
  TensorView view = TensorView::without_data(tensor.dtype, shape);
  view.data = &nothing;
  view.owner = std::make_shared<const FileTensor>(std::move(tensor));
  return view;
}

const FileTensor& stood_for(const TensorView& tensor) {
  return *static_cast<const FileTensor*>(tensor.owner.get());
}

// What is in dicts and lists stays.
Value shown_in_file(const Value& value) {
  const Value::Kind kind = value.kind();
  if (kind == Value::Kind::kDict || kind == Value::Kind::kList) return value;
  if (kind == Value::Kind::kTensor) {
    return stood_for(value.as_tensor()).is_lazy
               ? unreadable("a tensor that is lazily conjugated or negated")
               : value;
  }
  if (!holds_tensors(value)) return value;
  if (kind == Value::Kind::kTuple) return Value::list(value.items());
  return unreadable("an object that holds tensors");
}

Value read_file(const FileParts& read, const ChangeValue& change) {
  const ItemBytes item = bytes_of(read);
  const auto file = Archive::open(item);
  const auto bytes = file ? file->bytes(file->pickle()) : std::nullopt;
  if (!bytes || !file->check_byte_order()) {
    throw Error(ErrorCode::kInternal, "a part of the archive has not been read");
  }
  const auto crc = file->crc_of(file->pickle());
  if (crc && *crc != crc32(*bytes)) {
    throw Error(ErrorCode::kCorrupt, "the checksum of data.pkl does not match its bytes");
  }
  const auto make = [&](const TensorNode& node) {
    FileTensor tensor{.dtype = node.dtype, .shape = node.shape, .strides = node.strides};
    tensor.is_lazy = node.conjugated || node.negated;
    const ZipRecord* const record = file->storage(node.record, node.storage);
    if (record != nullptr && numel(node.shape) > 0) {
      const auto offset = offset_of(*file, item, *record);
      if (!offset) throw Error(ErrorCode::kInternal, "a header has not been read");
      tensor.record = {*offset, record->size, file->crc_of(*record)};
      tensor.offset = *offset + node.offset;
    }
    return Value(stand_in(std::move(tensor), node.shape));
  };
  return readable(read_value(Pickle::parse(*bytes, Pickle::Sizes::kCalls), make), change);
}

StoredChunk chunk_of(const FileTensor& tensor, const Box& part, const Box& box, uint32_t file) {
  const uint64_t size = itemsize(tensor.dtype);
  const Dims contiguous = contiguous_strides(part.shape);
  StoredChunk chunk{.box = box,
                    .at = {.file = file, .offset = tensor.offset, .length = size, .checksums = {}}};
  for (size_t d = 0; d < part.rank(); ++d) {
    const uint64_t stride = static_cast<uint64_t>(tensor.strides[d]) * size;
    chunk.at.offset += static_cast<uint64_t>(part.offset[d]) * stride;
    chunk.at.length += static_cast<uint64_t>(part.shape[d] - 1) * stride;
    if (part.shape[d] > 1 && tensor.strides[d] != contiguous[d]) chunk.strides = tensor.strides;
  }
  const FileTensor::Record& record = tensor.record;
  const bool is_record = chunk.at.offset == record.offset && chunk.at.length == record.size;
  if (record.crc32 && !chunk.strides && is_record) {
    chunk.at.checksums = ItemChecksums{0, *record.crc32, *record.crc32};
  }
  return chunk;
}

}  // namespace tilestone::archive
