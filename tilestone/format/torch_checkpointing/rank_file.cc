#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
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

using archive::ItemBytes;
using archive::ZipDirectory;
using archive::ZipRecord;

constexpr uint64_t kFirstTail = 64u << 10;           // bytes
constexpr uint64_t kAlignment = 64;                  // of records, as torch writes them
constexpr uint64_t kMaxExtra = 4 + kAlignment + 28;  // bytes: padding and a zip64 field
constexpr uint64_t kMaxValues = uint64_t{1} << 22;   // of a file, shared ones each time

[[noreturn]] void damaged_archive(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "torch.save archive: " + problem);
}

ItemBytes bytes_of(const FileParts& read) {
  std::vector<ItemBytes::Range> ranges;
  for (const auto& [offset, bytes] : read.parts) ranges.push_back({offset, bytes});
  return {read.size, std::move(ranges)};
}

class Archive {
 public:
  Archive(const ItemBytes& item, const ZipDirectory& directory)
      : item_(item), directory_(directory) {
    for (const ZipRecord& record : directory.records()) {
      const size_t slash = record.name.find('/');
      if (slash == std::string_view::npos || record.name.substr(slash) != "/data.pkl") continue;
      if (pickle_ != nullptr) damaged_archive("there are two records data.pkl");
      pickle_ = &record;
      top_ = record.name.substr(0, slash);
    }
    if (pickle_ == nullptr) damaged_archive("there is no record data.pkl");
  }

  const ZipRecord& pickle() const { return *pickle_; }
  const ZipRecord* byte_order() const { return directory_.find(top_ + "/byteorder"); }
  const ZipRecord* storage(std::string_view name) const {
    return directory_.find(top_ + "/data/" + std::string(name));
  }
  bool is_storage(const ZipRecord& record) const {
    return record.name.starts_with(top_ + "/data/");
  }

  // Where the record's bytes begin: as its local header says, if that has been read. Reading it for
  // each tensor takes too long, so otherwise it is where they must begin to end before what follows
  // them and to be aligned. nullopt: several places are possible.
  std::optional<uint64_t> offset_of(const ZipRecord& record) const {
    if (const auto offset = directory_.data_offset(item_, record)) return offset;
    const bool has_descriptor = (record.flags & archive::zip::kFlagDescriptor) != 0;
    const uint64_t least =
        record.header_offset + archive::zip::kLocalHeaderSize + record.name.size();
    std::optional<uint64_t> only;
    for (const uint64_t descriptor : {0, 16, 24}) {
      const uint64_t after = record.size + descriptor;
      if ((descriptor > 0) != has_descriptor || end_of(record) < least + after) continue;
      const uint64_t begin = end_of(record) - after;
      if (begin % kAlignment != 0 || begin - least > kMaxExtra) continue;
      if (only) return std::nullopt;
      only = begin;
    }
    return only;
  }

  // The range of the record with its header; of a large one, only the header.
  ProbeRange header_range(const ZipRecord& record, bool whole) const {
    const uint64_t size = end_of(record) - record.header_offset;
    return {record.header_offset, whole ? size : size - record.size};
  }

  ByteView bytes(const ZipRecord& record) const {
    const auto offset = directory_.data_offset(item_, record);
    const auto bytes = offset ? item_.find(*offset, record.size) : std::nullopt;
    if (!bytes) throw Error(ErrorCode::kInternal, "a record has not been read");
    if (directory_.has_checksums() && crc32(*bytes) != record.crc32) {
      damaged_archive("the checksum of \"" + std::string(record.name.substr(0, 200)) +
                      "\" does not match its bytes");
    }
    return *bytes;
  }

 private:
  // Where the next record, or the directory, begins.
  uint64_t end_of(const ZipRecord& record) const {
    const ZipRecord* const next = &record + 1;
    const ZipRecord* const end = directory_.records().data() + directory_.records().size();
    return next < end ? next->header_offset : directory_.offset();
  }

  const ItemBytes& item_;
  const ZipDirectory& directory_;
  const ZipRecord* pickle_ = nullptr;
  std::string top_;
};

// Stands in for the file's memory: a tensor of the pickle is a view of it, which nobody reads.
std::byte* address_of(uint64_t offset) {
  return reinterpret_cast<std::byte*>(offset + archive::zip::kLocalHeaderSize);
}
uint64_t offset_of(const std::byte* address) {
  return reinterpret_cast<uint64_t>(address) - archive::zip::kLocalHeaderSize;
}

struct Record {
  uint64_t offset = 0;
  uint64_t size = 0;
  std::optional<uint32_t> crc32;
};

archive::StorageSource storages_of(const Archive& file, const ZipDirectory& directory) {
  return [&](std::string_view name, uint64_t size) {
    const ZipRecord* const record = file.storage(name);
    if (size == 0 && (record == nullptr || record->size == 0)) {
      return archive::StorageBytes{address_of(0), 0, nullptr};
    }
    if (record == nullptr || record->size != size) {
      damaged_archive("the record of the storage \"" + std::string(name.substr(0, 200)) +
                      "\" is missing, or does not have " + std::to_string(size) + " bytes");
    }
    const auto offset = file.offset_of(*record);
    if (!offset) throw Error(ErrorCode::kInternal, "a header has not been read");
    auto owner = std::make_shared<Record>(Record{*offset, size, std::nullopt});
    if (directory.has_checksums()) owner->crc32 = record->crc32;
    return archive::StorageBytes{address_of(*offset), size, std::move(owner)};
  };
}

// The elements of such tensors would be computed from what nobody reads.
void refuse_lazy(const archive::Pickle& pickle) {
  for (archive::NodeId id = 0; id < pickle.node_count(); ++id) {
    const auto tensor = archive::read_tensor_node(pickle, id);
    if (!tensor || (!tensor->conjugated && !tensor->negated)) continue;
    throw Error(ErrorCode::kUnsupported, "the file has a lazily conjugated or negated tensor")
        .with_hint("save tensor.resolve_conj().resolve_neg() instead");
  }
}

constexpr std::string_view kUnreadable = "tilestone.unreadable";

// Whether the value says only why another one can't be read, or is a pickled object that looks so.
bool is_stand_in(const Value& value) {
  return value.kind() == Value::Kind::kOpaque && value.as_opaque().module == kUnreadable;
}

bool holds_tensors(const Value& value) {
  bool found = value.kind() == Value::Kind::kTensor;
  for_each_child(value, [&](const Value& child) { found = found || holds_tensors(child); });
  return found;
}

LocalTensor local_tensor(const TensorView& view) {
  LocalTensor local{.dtype = view.dtype, .shape = view.shape, .strides = view.strides};
  if (numel(view.shape) == 0) return local;
  const auto& record = *static_cast<const Record*>(view.owner.get());
  local.offset = offset_of(view.data);
  local.record_offset = record.offset;
  local.record_size = record.size;
  local.record_crc32 = record.crc32;
  return local;
}

Value stand_in(LocalTensor local, const Dims& shape) {
  TensorView view = TensorView::without_data(local.dtype, shape);
  view.data = address_of(0);
  view.strides = contiguous_strides(shape);
  view.owner = std::make_shared<const LocalTensor>(std::move(local));
  return view;
}

class Shown {
 public:
  Value of(const Value& value) {
    if (++values_ > kMaxValues)
      throw Error(ErrorCode::kUnsupported, "the file has too many values");
    const Value::Kind kind = value.kind();
    if (kind == Value::Kind::kDict) {
      Value::Dict entries = value.as_dict();
      for (auto& [key, item] : entries) item = of(item);
      return Value::dict(std::move(entries));
    }
    if (kind == Value::Kind::kTensor) {
      return stand_in(local_tensor(value.as_tensor()), value.as_tensor().shape);
    }
    auto tensor = read_dtensor(value);
    if (tensor && tensor->first.kind() == Value::Kind::kTensor) {
      LocalTensor local = local_tensor(tensor->first.as_tensor());
      const Dims whole = tensor->second.shape;
      local.distribution = std::move(tensor->second);
      return stand_in(std::move(local), whole);
    }
    return of_other(value, tensor.has_value());
  }

 private:
  Value of_other(const Value& value, bool is_tensor) {
    const bool is_sequence =
        value.kind() == Value::Kind::kList || value.kind() == Value::Kind::kTuple;
    if (is_sequence && (value.kind() == Value::Kind::kList || holds_tensors(value))) {
      Value::List items = value.items();
      for (Value& item : items) item = of(item);
      return Value::list(std::move(items));
    }
    if (is_tensor || holds_tensors(value)) return unreadable_value("an object that holds tensors");
    if (is_stand_in(value)) {
      return unreadable_value("an object of the module " + std::string(kUnreadable));
    }
    try {
      archive::check_value(value);
      return value;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      return unreadable_value("an object: " + error.message());
    }
  }

  static Value unreadable_value(std::string reason) {
    Opaque opaque;
    opaque.module = kUnreadable;
    opaque.name = "value";
    opaque.args = {Value(std::move(reason))};
    return opaque;
  }

  uint64_t values_ = 0;
};

}  // namespace

std::optional<ProbeRange> next_part(const FileParts& read) {
  const ItemBytes item = bytes_of(read);
  const auto directory = read.parts.empty() ? std::nullopt : ZipDirectory::parse(item);
  if (!directory) {
    const uint64_t size = std::min(read.size, kFirstTail << (2 * read.parts.size()));
    return ProbeRange{read.size - size, size};
  }
  const Archive file(item, *directory);
  std::vector<ProbeRange> needed = {file.header_range(file.pickle(), true)};
  if (file.byte_order() != nullptr) needed.push_back(file.header_range(*file.byte_order(), true));
  for (const ZipRecord& record : directory->records()) {
    if (record.size == 0 || !file.is_storage(record) || file.offset_of(record)) continue;
    needed.push_back(file.header_range(record, false));
  }
  for (const ProbeRange& range : needed) {
    if (!item.find(range.offset, range.size)) return range;
  }
  return std::nullopt;
}

Value read_rank_file(const FileParts& read) {
  const ItemBytes item = bytes_of(read);
  const auto directory = ZipDirectory::parse(item);
  if (!directory) throw Error(ErrorCode::kInternal, "a zip directory has not been read");
  const Archive file(item, *directory);
  if (file.byte_order() != nullptr && as_text(file.bytes(*file.byte_order())) != "little") {
    throw Error(ErrorCode::kUnsupported, "only little-endian files are supported");
  }
  using archive::Pickle;
  const Pickle pickle = Pickle::parse(file.bytes(file.pickle()), Pickle::Sizes::kCalls);
  refuse_lazy(pickle);
  return Shown().of(archive::read_value(pickle, storages_of(file, *directory)));
}

const LocalTensor& local_of(const TensorView& tensor) {
  return *static_cast<const LocalTensor*>(tensor.owner.get());
}

std::string unreadable(const Value& leaf) {
  if (is_stand_in(leaf)) return leaf.as_opaque().args[0].as_string();
  std::string reason;
  if (leaf.kind() == Value::Kind::kList) {
    for (const Value& item : leaf.items()) {
      if (reason.empty()) reason = unreadable(item);
    }
  }
  return reason;
}

}  // namespace tilestone::torch_checkpointing
