#include "tilestone/format/archive/archive_writer_internal.h"

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tilestone/base/checked.h"
#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/format/archive/pickle_writer_internal.h"
#include "tilestone/format/archive/value_check_internal.h"
#include "tilestone/format/archive/value_reader_internal.h"
#include "tilestone/format/archive/zip_writer_internal.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/state/value_children.h"

namespace tilestone::archive {
namespace {

// Adds the records that every archive has. The top folder is named as torch.save names it when it
// writes to a stream.
void add_fixed_records(ZipWriter& archive, ByteView pickle) {
  archive.add("archive/data.pkl", pickle);
  archive.add("archive/byteorder", as_bytes("little"));
  archive.add("archive/version", as_bytes("3\n"));
}

constexpr size_t kMaxKinds = 4096;  // in TensorArchives::known_, about 1 KiB each

uint64_t up_to(uint64_t offset, uint64_t alignment) { return align_up(offset, alignment) - offset; }

// A large tensor gets the same offset within a page in the file as in memory, so that direct I/O
// can write it from there, and can read it into memory that an allocator places in the same way.
// The offset is rounded down to the alignment that every payload has.
uint64_t payload_padding(const TensorView& tensor, uint64_t offset) {
  const uint64_t size = tensor.bytes();
  if (size < kPageAlignedFrom) return up_to(offset, ZipWriter::kAlignment);
  uint64_t place = 0;
  if (size >= kPlacedFrom && tensor.device == nullptr) {
    place = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(tensor.data)) % kPage;
    place -= place % ZipWriter::kAlignment;
  }
  return (place - offset) % kPage;
}

// The tensor's elements in C order, if they lie so in memory.
std::optional<ByteView> contiguous(const TensorView& tensor) {
  if (tensor.device != nullptr || !tensor.has_data()) return std::nullopt;
  if (tensor.bytes() > 0 && !tensor.strided_view().is_contiguous()) return std::nullopt;
  return ByteView(tensor.data, tensor.bytes());
}

Bytes packed(const TensorView& tensor) {
  Bytes bytes(tensor.bytes());
  pack_range(tensor.strided_view(), 0, bytes);
  return bytes;
}

// The parts that occur in the value more than once, by Value::shared_id(). A part that occurs once
// may have an id too, because its owner is elsewhere.
std::unordered_set<const void*> repeated_parts(const Value& value) {
  std::unordered_set<const void*> seen, repeated;
  for_each_part(value, [&](const Value& part) {
    const void* const shared = part.shared_id();
    if (shared == nullptr || seen.insert(shared).second) return true;
    repeated.insert(shared);
    return false;
  });
  return repeated;
}

// Writes one value as a pickle. Collects the elements of its tensors as records. A part that occurs
// more than once is written once, so that stock readers return one shared object too. The bytes
// depend on the value alone, and not on who else owns parts of it.
class ValueWriter {
 public:
  explicit ValueWriter(int protocol) : out_(protocol) {}

  Bytes write(const Value& value) {
    repeated_ = repeated_parts(value);
    put(value);
    return std::move(out_).finish();
  }
  std::vector<TensorView>& tensors() { return tensors_; }

 private:
  void put(const Value& value) {
    const void* shared = value.shared_id();
    if (!repeated_.contains(shared)) return put_whole(value);
    const auto known = memo_.find(shared);
    if (known != memo_.end()) return out_.get(known->second);
    put_whole(value);
    memo_.emplace(shared, out_.memoize());
  }

  void put_whole(const Value& value) {
    switch (value.kind()) {
      case Value::Kind::kNull:
        return out_.none();
      case Value::Kind::kBool:
        return out_.boolean(value.as_bool());
      case Value::Kind::kInt:
        return out_.integer(value.as_int());
      case Value::Kind::kBigInt:
        return out_.big_integer(value.as_big_int().bytes);
      case Value::Kind::kFloat:
        return out_.floating(value.as_float());
      case Value::Kind::kString:
        return out_.string(value.as_string());
      case Value::Kind::kBytes:
        return out_.bytes(value.as_bytes());
      case Value::Kind::kList:
        return put_list(value.items());
      case Value::Kind::kTuple:
        return put_tuple(value.items());
      case Value::Kind::kDict:
        return put_dict(value);
      case Value::Kind::kTensor:
        return put_tensor(value.as_tensor(), value.autograd());
      case Value::Kind::kDType:
        return out_.global("torch", to_string(value.as_dtype()));
      case Value::Kind::kOpaque:
        return put_opaque(value.as_opaque());
      case Value::Kind::kPickled:
        throw Error(ErrorCode::kInvalidArgument,
                    "an object that Python has pickled can't be part of another value");
    }
  }

  void put_all(const Value::List& items) {
    for (const Value& item : items) put(item);
  }
  void put_tuple(const Value::List& items) {
    if (items.empty()) return out_.op(op::kEmptyTuple);
    out_.op(op::kMark);
    put_all(items);
    out_.op(op::kTuple);
  }
  void append(const Value::List& items) {
    if (items.empty()) return;
    out_.op(op::kMark);
    put_all(items);
    out_.op(op::kAppends);
  }
  void put_list(const Value::List& items) {
    out_.op(op::kEmptyList);
    append(items);
  }
  void set_items(const Value::Dict& items) {
    if (items.empty()) return;
    out_.op(op::kMark);
    for (const auto& [key, value] : items) {
      put(key);
      put(value);
    }
    out_.op(op::kSetItems);
  }
  void put_dict(const Value& dict) {
    if (dict.is_ordered_dict()) {
      out_.global("collections", "OrderedDict");
      out_.op(op::kEmptyTuple);
      out_.op(op::kReduce);
    } else {
      out_.op(op::kEmptyDict);
    }
    set_items(dict.as_dict());
    if (!dict.attributes().is_null()) put_state(dict.attributes());
  }
  void put_state(const Value& state) {
    put(state);
    out_.op(op::kBuild);
  }
  void put_tensor(const TensorView& tensor, Autograd autograd) {
    write_tensor_node(out_, tensor.dtype, tensor.shape, std::to_string(tensors_.size()), autograd);
    tensors_.push_back(tensor);
  }
  void put_opaque(const Opaque& opaque) {
    out_.global(opaque.module, opaque.name);
    if (opaque.kind == Opaque::Kind::kGlobal) return;
    put_tuple(opaque.args);
    if (!opaque.keywords.empty()) {
      out_.op(op::kEmptyDict);
      set_items(opaque.keywords);
      out_.op(op::kNewObjEx);
    } else {
      out_.op(opaque.kind == Opaque::Kind::kCall ? op::kReduce : op::kNewObj);
    }
    append(opaque.appended);
    set_items(opaque.entries);
    if (opaque.has_state) put_state(opaque.state);
  }

  PickleWriter out_;
  std::unordered_set<const void*> repeated_;
  std::unordered_map<const void*, uint32_t> memo_;  // of repeated parts
  std::vector<TensorView> tensors_;                 // by record
};

}  // namespace

ItemRecipe TensorArchives::recipe(const Piece& piece, uint64_t file_offset) {
  const uint64_t size = piece.data.bytes();
  const Kind kind{piece.data.dtype, piece.box.shape};
  auto known = known_.find(kind);
  if (known == known_.end()) {
    if (known_.size() == kMaxKinds) known_.clear();
    known = known_.emplace(kind, make(kind, size)).first;
  }
  const auto& [head, tail] = known->second;
  ItemRecipe recipe;
  recipe.payload_offset = head->bytes.size();
  recipe.padding = payload_padding(piece.data, file_offset + recipe.payload_offset);
  recipe.length = head->bytes.size() + size + tail->bytes.size();
  recipe.segments.reserve(3);
  recipe.segments.push_back({head->bytes.size(), head, nullptr});
  recipe.segments.push_back({size, nullptr, &piece.data});
  recipe.segments.push_back({tail->bytes.size(), tail, nullptr});
  return recipe;
}

TensorArchives::ArchiveEnds TensorArchives::make(const Kind& kind, uint64_t size) {
  PickleWriter pickle(2);
  write_tensor_node(pickle, kind.dtype, kind.shape, "0");
  ZipWriter archive;
  add_fixed_records(archive, std::move(pickle).finish());
  archive.begin("archive/data/0", size);
  Literal head{archive.take(), {}};
  archive.end(0);
  const uint64_t in_directory = archive.finish();
  Literal tail{archive.take(), {}};
  constexpr uint64_t kInDescriptor = 4;  // bytes
  if (size > 0) tail.crc32_at = {kInDescriptor, in_directory};
  return {std::make_shared<const Literal>(std::move(head)),
          std::make_shared<const Literal>(std::move(tail))};
}

namespace {

// An archive's bytes, in order.
std::vector<Literal> parts_of_archive(const Value& value) {
  constexpr uint64_t kBorrowedFrom = 64u << 10;  // bytes
  std::vector<Literal> parts;
  ZipWriter archive;
  if (value.kind() == Value::Kind::kPickled) {
    const Pickled& pickled = value.as_pickled();
    if (pickled.archive) {
      parts.push_back({.bytes = {}, .borrowed = pickled.bytes});
      return parts;
    }
    add_fixed_records(archive, pickled.bytes);
  } else {
    ValueWriter writer(protocol_of(value));
    add_fixed_records(archive, writer.write(value));
    for (size_t i = 0; i < writer.tensors().size(); ++i) {
      const TensorView& tensor = writer.tensors()[i];
      const std::string name = "archive/data/" + std::to_string(i);
      const auto elements = contiguous(tensor);
      if (!elements) {
        archive.add(name, packed(tensor));
      } else if (elements->size() < kBorrowedFrom) {
        archive.add(name, *elements);
      } else {
        archive.begin(name, elements->size(), crc32(*elements));
        parts.push_back({.bytes = archive.take()});
        parts.push_back({.bytes = {}, .borrowed = *elements});
      }
    }
  }
  archive.finish();
  parts.push_back({.bytes = archive.take()});
  return parts;
}

}  // namespace

Bytes write_archive(const Value& value) {
  std::vector<Literal> parts = parts_of_archive(value);
  if (parts.size() == 1 && parts.front().borrowed.empty()) return std::move(parts.front().bytes);
  Bytes whole;
  uint64_t size = 0;
  for (const Literal& part : parts) size += part.view().size();
  whole.reserve(size);
  for (const Literal& part : parts) {
    whole.insert(whole.end(), part.view().begin(), part.view().end());
  }
  return whole;
}

ItemRecipe recipe_of_archive(const Value& value) {
  ItemRecipe recipe;
  for (Literal& part : parts_of_archive(value)) {
    const uint64_t size = part.view().size();
    recipe.length += size;
    recipe.segments.push_back({size, std::make_shared<const Literal>(std::move(part)), nullptr});
  }
  return recipe;
}

PickledValue pickle_value(const Value& value) {
  ValueWriter writer(protocol_of(value));
  PickledValue pickled;
  pickled.pickle = writer.write(value);
  pickled.tensors = std::move(writer.tensors());
  return pickled;
}

}  // namespace tilestone::archive
