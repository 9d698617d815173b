#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/archive/archive_reader_internal.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/tensor_node_internal.h"
#include "tilestone/format/archive/value_check_internal.h"
#include "tilestone/format/archive/value_reader_internal.h"
#include "tilestone/format/archive/zip_format_internal.h"
#include "tilestone/format/archive/zip_reader_internal.h"
#include "tilestone/format/torch_checkpointing/parts_internal.h"
#include "tilestone/state/value_children.h"

namespace tilestone::torch_checkpointing {
namespace {

using archive::Archive;
using archive::ItemBytes;
using archive::ZipRecord;

constexpr uint64_t kFirstTail = 64u << 10;           // bytes
constexpr uint64_t kAlignment = 64;                  // of records, as torch writes them
constexpr uint64_t kMaxExtra = 4 + kAlignment + 28;  // bytes: padding and a zip64 field

ItemBytes bytes_of(const FileParts& read) {
  std::vector<ItemBytes::Range> ranges;
  for (const auto& [offset, bytes] : read.parts) ranges.push_back({offset, bytes});
  return {read.size, std::move(ranges)};
}

// Where the record's bytes begin: as its local header says, if that has been read. Reading it for
// each tensor takes too long, so otherwise it is where they must begin to end before what follows
// them and to be aligned. nullopt: several places are possible.
std::optional<uint64_t> offset_of(const Archive& archive, const ItemBytes& item,
                                  const ZipRecord& record) {
  if (const auto offset = archive.directory().data_offset(item, record)) return offset;
  const bool has_descriptor = (record.flags & archive::zip::kFlagDescriptor) != 0;
  const uint64_t least = record.header_offset + archive::zip::kLocalHeaderSize + record.name.size();
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

// Stands in for the file's memory: a tensor of the pickle is a view of it, which nobody reads.
std::byte* address_of(uint64_t offset) {
  return reinterpret_cast<std::byte*>(offset + archive::zip::kLocalHeaderSize);
}
uint64_t offset_at(const std::byte* address) {
  return reinterpret_cast<uint64_t>(address) - archive::zip::kLocalHeaderSize;
}

archive::StorageSource storages_of(const Archive& file, const ItemBytes& item) {
  return [&](std::string_view name, uint64_t size) {
    const ZipRecord* const record = file.storage(name, size);
    if (record == nullptr || size == 0) return archive::StorageBytes{address_of(0), 0, nullptr};
    const auto offset = offset_of(file, item, *record);
    if (!offset) throw Error(ErrorCode::kInternal, "a header has not been read");
    auto owner = std::make_shared<LocalRecord>(LocalRecord{*offset, size, file.crc_of(*record)});
    return archive::StorageBytes{address_of(*offset), size, std::move(owner)};
  };
}

bool holds_tensors(const Value& value) {
  bool found = value.kind() == Value::Kind::kTensor;
  for_each_child(value, [&](const Value& child) { found = found || holds_tensors(child); });
  return found;
}

// Of a local tensor; it has the shape of the whole one.
Value stand_in(const TensorView& view, std::optional<Distribution> distribution = std::nullopt) {
  LocalTensor local{.dtype = view.dtype, .shape = view.shape, .strides = view.strides};
  if (numel(view.shape) > 0) {
    local.record = *static_cast<const LocalRecord*>(view.owner.get());
    local.offset = offset_at(view.data);
  }
  TensorView made =
      TensorView::without_data(view.dtype, distribution ? distribution->shape : view.shape);
  made.data = address_of(0);
  made.strides = contiguous_strides(made.shape);
  local.distribution = std::move(distribution);
  made.owner = std::make_shared<const LocalTensor>(std::move(local));
  return made;
}

// As read_rank_file() shows a value; what is in dicts and lists stays.
Value shown(const Value& value) {
  const Value::Kind kind = value.kind();
  if (kind == Value::Kind::kDict || kind == Value::Kind::kList) return value;
  if (kind == Value::Kind::kTensor) return stand_in(value.as_tensor());
  auto tensor = read_dtensor(value);
  if (tensor && tensor->first.kind() == Value::Kind::kTensor) {
    return stand_in(tensor->first.as_tensor(), std::move(tensor->second));
  }
  if (!tensor && !holds_tensors(value)) return value;
  if (kind == Value::Kind::kTuple) return Value::list(value.items());
  return archive::unreadable("an object that holds tensors");
}

}  // namespace

std::optional<ProbeRange> next_part(const FileParts& read) {
  const ItemBytes item = bytes_of(read);
  const auto file = read.parts.empty() ? std::nullopt : Archive::open(item);
  if (!file) {
    const uint64_t size = std::min(read.size, kFirstTail << (2 * read.parts.size()));
    return ProbeRange{read.size - size, size};
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

Value read_rank_file(const FileParts& read) {
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
  using archive::Pickle;
  const Pickle pickle = Pickle::parse(*bytes, Pickle::Sizes::kCalls);
  for (archive::NodeId id = 0; id < pickle.node_count(); ++id) {
    if (const auto tensor = archive::read_tensor_node(pickle, id)) archive::refuse_lazy(*tensor);
  }
  return archive::readable(archive::read_value(pickle, storages_of(*file, item)), shown);
}

const LocalTensor& local_of(const TensorView& tensor) {
  return *static_cast<const LocalTensor*>(tensor.owner.get());
}

}  // namespace tilestone::torch_checkpointing
