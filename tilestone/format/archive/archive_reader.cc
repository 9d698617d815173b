#include "tilestone/format/archive/archive_reader_internal.h"

#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/pickle_schema_internal.h"
#include "tilestone/format/archive/tensor_node_internal.h"
#include "tilestone/format/archive/value_reader_internal.h"
#include "tilestone/format/archive/zip_format_internal.h"
#include "tilestone/geometry/strided_copy.h"

namespace tilestone::archive {
namespace {

constexpr std::string_view kPickleName = "/data.pkl";

[[noreturn]] void corrupt(const std::string& problem) {
  throw Error(ErrorCode::kCorrupt, "torch.save archive: " + problem);
}

void check_start(const ItemBytes& item) {
  constexpr std::string_view kZip = "PK\3\4";
  constexpr std::string_view kLegacy("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
                                     14);
  const auto legacy = item.find(0, std::min<uint64_t>(item.length(), kLegacy.size()));
  if (legacy && as_text(*legacy) == kLegacy) {
    throw Error(ErrorCode::kUnsupported,
                "the item is not a zip archive; it was saved in the format of torch before 1.6")
        .with_hint("load it with torch and save it again");
  }
  const auto start = item.find(0, std::min<uint64_t>(item.length(), kZip.size()));
  if (start && as_text(*start) != kZip) corrupt("it does not start with a zip header");
}

}  // namespace

std::optional<Archive> Archive::open(const ItemBytes& item) {
  check_start(item);
  auto directory = ZipDirectory::parse(item);
  if (!directory) return std::nullopt;
  return Archive(item, std::move(*directory));
}

Archive::Archive(const ItemBytes& item, ZipDirectory directory)
    : item_(item), directory_(std::move(directory)) {
  for (const ZipRecord& record : directory_.records()) {
    const size_t slash = record.name.find('/');
    if (slash == 0 || record.name.substr(std::min(slash, record.name.size())) != kPickleName) {
      continue;
    }
    if (pickle_ != nullptr) corrupt("there are two records data.pkl");
    pickle_ = &record;
    top_ = record.name.substr(0, slash);
  }
  if (pickle_ == nullptr) corrupt("there is no record data.pkl");
}

std::optional<ByteView> Archive::bytes(const ZipRecord& record) const {
  const auto offset = directory_.data_offset(item_, record);
  return offset ? item_.find(*offset, record.size) : std::nullopt;
}

const ZipRecord* Archive::storage(std::string_view name, uint64_t expected_size) const {
  const std::string full = std::string(top_) + "/data/" + std::string(name);
  const ZipRecord* record = directory_.find(full);
  if (record == nullptr) {
    if (expected_size == 0) return nullptr;  // some writers omit empty records
    corrupt("there is no record \"" + full.substr(0, 200) + "\"");
  }
  if (record->size != expected_size) {
    corrupt("record \"" + full.substr(0, 200) + "\" has " + std::to_string(record->size) +
            " bytes, but its tensor's storage has " + std::to_string(expected_size));
  }
  return record;
}

const ZipRecord* Archive::byte_order() const {
  return directory_.find(std::string(top_) + "/byteorder");
}

bool Archive::check_byte_order() const {
  const ZipRecord* record = byte_order();
  if (record == nullptr) return true;
  const auto text = bytes(*record);
  if (!text) return false;
  if (as_text(*text) != "little") {
    throw Error(ErrorCode::kUnsupported, "torch.save archive: the byte order \"" +
                                             std::string(as_text(*text).substr(0, 20)) +
                                             "\" is not supported, only \"little\"");
  }
  return true;
}

std::optional<uint32_t> Archive::crc_of(const ZipRecord& record) const {
  if (!directory_.has_checksums()) return std::nullopt;
  return record.crc32;
}

uint64_t Archive::end_of(const ZipRecord& record) const {
  const ZipRecord* const next = &record + 1;
  const ZipRecord* const end = directory_.records().data() + directory_.records().size();
  return next < end ? next->header_offset : directory_.offset();
}

namespace {

// Its elements must be computed from the stored ones.
void refuse_lazy(const TensorNode& tensor) {
  if (!tensor.conjugated && !tensor.negated) return;
  throw Error(ErrorCode::kUnsupported, "torch.save archive: a tensor is lazily " +
                                           std::string(tensor.negated ? "negated" : "conjugated"))
      .with_hint("save tensor.resolve_conj().resolve_neg() instead");
}

// The bytes of a storage's record in the archive; empty if the storage is empty and has no record.
ByteView stored_bytes(const Archive& archive, std::string_view name, uint64_t size) {
  const ZipRecord* record = archive.storage(name, size);
  if (record == nullptr) return {};
  const auto bytes = archive.bytes(*record);
  if (!bytes) corrupt("a record is outside the archive");
  return *bytes;
}

bool is_aligned(ByteView bytes) {
  constexpr uintptr_t kAlignment = 16;  // of the largest element
  return reinterpret_cast<uintptr_t>(bytes.data()) % kAlignment == 0;
}

// Computes the elements of a lazily conjugated or negated tensor, in new memory.
TensorView resolved(const TensorNode& node, const TensorView& stored) {
  TensorView made = TensorView::allocate(stored.dtype, stored.shape);
  const uint64_t size = stored.bytes();
  std::byte* bytes = made.data;
  pack_range(stored.strided_view(), 0, MutableByteView(bytes, size));
  const bool complex = is_complex(stored.dtype);
  const uint64_t number = itemsize(stored.dtype) / (complex ? 2 : 1);
  for (uint64_t at = 0, index = 0; at < size; at += number, ++index) {
    const bool imaginary = complex && index % 2 == 1;
    // Little-endian IEEE numbers: the sign is the top bit of the last byte.
    if (node.negated != (node.conjugated && imaginary)) bytes[at + number - 1] ^= std::byte{0x80};
  }
  return made;
}

// Makes tensors that are views of the archive's records and share `owner`, or borrow the records.
// Otherwise, and of a record whose elements would not be aligned, they are views of copies; each
// record is copied once, for all tensors that share it.
class TensorMaker {
 public:
  TensorMaker(const Archive& archive, std::shared_ptr<const void> owner, bool borrows)
      : archive_(archive), owner_(std::move(owner)), borrows_(borrows) {}

  Value operator()(const TensorNode& tensor) {
    const ByteView stored = stored_bytes(archive_, tensor.record, tensor.storage);
    if (numel(tensor.shape) == 0) {
      return Value(TensorView::allocate(tensor.dtype, tensor.shape), tensor.autograd);
    }
    // NOLINTNEXTLINE: only the value's owner writes to its tensors.
    std::byte* data = const_cast<std::byte*>(stored.data());
    std::shared_ptr<const void> owner = owner_;
    if (!borrows_ && (owner == nullptr || !is_aligned(stored))) {
      std::shared_ptr<Bytes>& copy = copies_[std::string(tensor.record)];
      if (copy == nullptr) copy = std::make_shared<Bytes>(stored.begin(), stored.end());
      data = copy->data();
      owner = copy;
    }
    TensorView view = TensorView::strided(data + tensor.offset, tensor.dtype, tensor.shape,
                                          tensor.strides, data, stored.size(), std::move(owner));
    if (!tensor.conjugated && !tensor.negated) return Value(std::move(view), tensor.autograd);
    // The elements are copied. The limit is twice the bytes of the storages, so that a small file
    // can't claim much memory.
    if (resolvable_.insert(std::string(tensor.record)).second) to_resolve_ += 2 * stored.size();
    if (view.bytes() > to_resolve_) {
      throw Error(ErrorCode::kUnsafe,
                  "pickle: lazily conjugated or negated tensors use their storage too often");
    }
    to_resolve_ -= view.bytes();
    return Value(resolved(tensor, view), tensor.autograd);
  }

 private:
  const Archive& archive_;
  const std::shared_ptr<const void> owner_;
  const bool borrows_;
  std::unordered_map<std::string, std::shared_ptr<Bytes>> copies_;
  std::unordered_set<std::string> resolvable_;  // records of lazily conjugated or negated tensors
  uint64_t to_resolve_ = 0;                     // bytes that may still be copied for these
};

// The archive's pickle. All of the archive must be available.
Pickle parse_pickle(const Archive& archive) {
  archive.check_byte_order();
  const auto bytes = archive.bytes(archive.pickle());
  if (!bytes) corrupt("the record data.pkl is outside the archive");
  return Pickle::parse(*bytes, Pickle::Sizes::kCalls);
}

// ---- verify ----

// Checks the record's checksum, and its data descriptor if it has one. All of the archive must be
// available.
std::optional<ItemFault> check_record(const Archive& archive, const ItemBytes& item,
                                      const ZipRecord& record) {
  const uint64_t begin = *archive.directory().data_offset(item, record);
  const ByteView bytes = *item.find(begin, record.size);
  const std::string name = "record \"" + std::string(record.name.substr(0, 200)) + "\"";
  if (archive.crc_of(record) && crc32(bytes) != record.crc32) {
    return ItemFault{begin, "the checksum of " + name + " does not match its bytes"};
  }
  if ((record.flags & zip::kFlagDescriptor) == 0) return std::nullopt;

  const uint64_t end = begin + record.size;
  const uint64_t limit = archive.end_of(record);
  const auto descriptor_is = [&](auto number) {
    Bytes expected;
    const auto put = [&](auto value) {
      const size_t at = expected.size();
      expected.resize(at + sizeof(value));
      std::memcpy(expected.data() + at, &value, sizeof(value));
    };
    put(zip::kDescriptor);
    put(record.crc32);
    put(static_cast<decltype(number)>(record.size));
    put(static_cast<decltype(number)>(record.size));
    if (limit - end < expected.size()) return false;
    const ByteView found = *item.find(end, expected.size());
    return std::memcmp(found.data(), expected.data(), expected.size()) == 0;
  };
  const bool fits = record.size <= zip::kMax32 && descriptor_is(uint32_t{});
  if (!fits && !descriptor_is(uint64_t{})) {
    return ItemFault{end, "the descriptor of " + name + " contradicts the directory"};
  }
  return std::nullopt;
}

}  // namespace

std::optional<StoredPayload> locate_tensor(const ItemBytes& item) {
  const auto archive = Archive::open(item);
  if (!archive || !archive->check_byte_order()) return std::nullopt;
  const auto pickle_bytes = archive->bytes(archive->pickle());
  if (!pickle_bytes) return std::nullopt;
  const Pickle pickle = Pickle::parse(*pickle_bytes);
  const auto tensor = read_tensor_node(pickle, pickle.root());
  if (!tensor) {
    throw Error(ErrorCode::kUnsupported,
                "torch.save archive: expected a tensor, found " + describe(pickle, pickle.root()));
  }
  refuse_lazy(*tensor);
  StoredPayload payload;
  payload.dtype = tensor->dtype;
  payload.shape = tensor->shape;
  payload.strides = tensor->strides;
  const ZipRecord* record = archive->storage(tensor->record, tensor->storage);
  if (record == nullptr) return payload;
  const auto begin = archive->directory().data_offset(item, *record);
  if (!begin) return std::nullopt;
  payload.record_offset = *begin;
  payload.record_size = record->size;
  payload.record_crc32 = archive->crc_of(*record);
  payload.offset = *begin + tensor->offset;
  return payload;
}

Value read_archive(const SharedBytes& bytes) {
  const ItemBytes item(bytes);
  const auto archive = Archive::open(item);
  if (!archive) corrupt("its directory is outside the archive");
  return read_value(parse_pickle(*archive), TensorMaker(*archive, bytes.owner(), false));
}

Value view_archive(ByteView bytes) {
  const ItemBytes item(bytes);
  const auto archive = Archive::open(item);
  if (!archive) corrupt("its directory is outside the archive");
  return read_value(parse_pickle(*archive), TensorMaker(*archive, nullptr, true));
}

std::optional<ItemFault> check_archive(ByteView bytes) {
  const ItemBytes item(bytes);
  const auto archive = Archive::open(item);
  if (!archive) corrupt("its directory is outside the archive");
  for (const ZipRecord& record : archive->directory().records()) {
    if (auto fault = check_record(*archive, item, record)) return fault;
  }
  const Pickle pickle = parse_pickle(*archive);
  for (NodeId id = 0; id < pickle.node_count(); ++id) {
    const auto tensor = read_tensor_node(pickle, id);
    if (tensor) archive->storage(tensor->record, tensor->storage);
  }
  return std::nullopt;
}

std::optional<ItemFault> find_fault(ByteView item) {
  try {
    return check_archive(item);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kUnsafe) throw;
    return ItemFault{0, error.message()};
  }
}

}  // namespace tilestone::archive
