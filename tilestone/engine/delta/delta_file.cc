#include "tilestone/engine/delta/delta_file_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/delta/walk_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/engine/write/stream_internal.h"
#include "tilestone/format/safetensors/dtype_names_internal.h"
#include "tilestone/geometry/strided_copy.h"
#include "tilestone/storage/one_file.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kCopied = 8u << 20;  // bytes of a spool that are copied at once

Bytes read_range(Storage& storage, const ReadableFile& file, uint64_t begin, uint64_t end,
                 const Deadline& deadline) {
  Bytes bytes(end - begin);
  if (bytes.empty()) return bytes;
  const ReadOp op{&file, begin, bytes.size(), bytes.data()};
  ReadOptions options;
  options.buffers = BufferPool::create(BufferPool::kDefaultBuffer);
  options.deadline = deadline;
  options.cache = CachePolicy::kKeep;
  storage.read({&op, 1}, options, [](size_t, ByteView) {});
  return bytes;
}

// safetensors has no name for some dtypes, and other shapes for pairs of 4-bit elements.
bool has_name(DType dtype) {
  return dtype != DType::kFloat4E2M1FNX2 && safetensors::name_of(dtype).has_value();
}

}  // namespace

DeltaReport report_of(const DeltaIndex& index) {
  DeltaReport report;
  report.base = index.base;
  report.result = index.result;
  for (const DeltaTensor& tensor : index.tensors) {
    if (tensor.removed()) {
      ++report.removed;
      continue;
    }
    report.whole_bytes += tensor.bytes();
    if (tensor.unchanged()) {
      ++report.unchanged;
    } else {
      ++(tensor.before ? report.changed : report.added);
    }
  }
  return report;
}

void DeltaBody::put(const std::string& key, DType dtype, const Dims& shape, ByteView bytes) {
  Part& part = parts_[itemsize(dtype)];
  part.entries.push_back({key, dtype, shape});
  part.bytes += bytes.size();
  if (spool_ == nullptr) return part.views.push_back(bytes);
  if (part.spooled == nullptr) {
    part.spooled = spool_->create("spool-" + std::to_string(itemsize(dtype)));
  }
  part.spooled->append(bytes);
}

DeltaPiece DeltaBody::add(const DeltaTensor& tensor, const Box& box, const EncodedPiece& encoded,
                          ByteView now) {
  DeltaPiece piece{.box = box, .kind = encoded.kind, .gap_bytes = encoded.gap_bytes};
  const std::string name = delta_entry(tensor, piece);
  const auto count = [](const Bytes& bytes, uint64_t item) {
    return Dims{static_cast<int64_t>(bytes.size() / item)};
  };
  const bool named = has_name(tensor.dtype);
  const DType dtype = named ? tensor.dtype : DType::kUInt8;
  if (piece.kind == DeltaKind::kSparse) {
    const bool wide = piece.gap_bytes == 2;
    put(name + std::string(kDeltaPositions), wide ? DType::kUInt16 : DType::kUInt8,
        count(encoded.positions, piece.gap_bytes), encoded.positions);
    put(name + std::string(kDeltaValues), dtype, count(encoded.values, itemsize(dtype)),
        encoded.values);
    piece.crc32 = crc32(encoded.values, crc32(encoded.positions));
  } else if (piece.kind == DeltaKind::kXor) {
    put(name + std::string(kDeltaXor), DType::kUInt8, count(encoded.values, 1), encoded.values);
    piece.crc32 = crc32(encoded.values);
  } else {
    put(name + std::string(kDeltaValues), dtype,
        named ? box.shape : Dims{static_cast<int64_t>(now.size())}, now);
    piece.crc32 = crc32(now);
  }
  return piece;
}

DeltaEntries DeltaBody::entries() const {
  DeltaEntries entries;
  for (const auto& [item, part] : parts_) {
    entries.insert(entries.end(), part.entries.begin(), part.entries.end());
  }
  return entries;
}

uint64_t DeltaBody::bytes() const {
  uint64_t bytes = 0;
  for (const auto& [item, part] : parts_) bytes += part.bytes;
  return bytes;
}

void DeltaBody::write(Storage& storage, const std::string& name, const Bytes& header,
                      const Deadline& deadline) {
  const uint64_t size = header.size() + bytes();
  const auto file = storage.create(name, size, deadline);
  StreamContext context;
  context.buffers = make_pool(kDefaultBufferBytes / 4, 1, size);
  context.deadline = deadline;
  FileStream stream(*file, context, FetchAhead({}, nullptr, deadline));
  stream.write(ByteView(header));
  for (auto& [item, part] : parts_) {
    if (part.spooled != nullptr) {
      part.spooled->close();
      const auto spooled = spool_->open(part.spooled->name());
      for (uint64_t at = 0; at < spooled->size(); at += kCopied) {
        const uint64_t end = std::min(at + kCopied, spooled->size());
        stream.write(ByteView(read_range(*spool_, *spooled, at, end, deadline)));
      }
    }
    for (const ByteView view : part.views) stream.write(view);
  }
  stream.finish();
  file->sync(deadline);
  file->close();
}

DeltaFile DeltaFile::open(const Location& location, const Deadline& deadline) {
  DeltaFile delta;
  delta.place_ = location.describe();
  delta.deadline_ = deadline;
  delta.storage_ = location.shared();
  std::string name(kDeltaName);
  if (const auto entry = entry_of_one_file(*delta.storage_)) {
    delta.storage_ = entry->storage;
    name = entry->name;
  }
  if (!delta.storage_->stat(name)) {
    throw Error(ErrorCode::kNotFound, "there is no delta at " + delta.place_).with_file(name);
  }
  Opened& first = delta.files_[""] = delta.open_file(name);
  if (!first.header.index) {
    throw Error(ErrorCode::kUnsupported, "the safetensors file is no delta")
        .with_file(name)
        .with_hint("`tilestone delta A B PATH` makes one");
  }
  delta.index_ = *std::move(first.header.index);
  for (const DeltaTensor& tensor : delta.index_.tensors) {
    for (const DeltaPiece& piece : tensor.pieces) {
      if (!delta.files_.contains(piece.file)) {
        delta.files_[piece.file] = delta.open_file(piece.file);
      }
      delta.check_entries(tensor, piece);
    }
  }
  for (const auto& [file, opened] : delta.files_) delta.bytes_ += opened.file->size();
  return delta;
}

DeltaFile::Opened DeltaFile::open_file(const std::string& name) const {
  constexpr uint64_t kBegin = safetensors::kLengthBytes;
  Opened opened{storage_->open(name), {}};
  const uint64_t size = opened.file->size();
  const Bytes first = read_range(*storage_, *opened.file, 0, std::min(size, kBegin), deadline_);
  const uint64_t end = kBegin + safetensors::header_length(first, size, name);
  opened.header =
      parse_delta_header(read_range(*storage_, *opened.file, kBegin, end, deadline_), size, name);
  return opened;
}

const safetensors::HeaderTensor& DeltaFile::entry(const DeltaTensor& tensor,
                                                  const DeltaPiece& piece,
                                                  std::string_view suffix) const {
  const auto& entries = files_.find(piece.file)->second.header.entries;
  const auto found = entries.find(delta_entry(tensor, piece) + std::string(suffix));
  if (found != entries.end()) return found->second;
  throw Error(ErrorCode::kCorrupt,
              "the delta lacks the" + std::string(suffix) + " of " + to_string(piece.box))
      .with_key(tensor.key)
      .with_file(piece.file);
}

void DeltaFile::check_entries(const DeltaTensor& tensor, const DeltaPiece& piece) const {
  const auto elements = static_cast<uint64_t>(piece.box.numel());
  const uint64_t bytes = elements * itemsize(tensor.dtype);
  const auto expect = [&](std::string_view suffix, uint64_t least, uint64_t most) {
    const auto& has = entry(tensor, piece, suffix);
    const uint64_t found = has.end - has.begin;
    if (least <= found && found <= most) return;
    throw Error(ErrorCode::kCorrupt,
                fmt::format("the {}{} of a box of {} bytes has {} bytes in the "
                            "delta; at most {} are expected",
                            delta_entry(tensor, piece), suffix, bytes, found, most))
        .with_key(tensor.key)
        .with_file(piece.file);
  };
  if (piece.kind == DeltaKind::kXor) return expect(kDeltaXor, 0, bytes + bytes / 64 + 4096);
  if (piece.kind == DeltaKind::kSparse) expect(kDeltaPositions, 0, elements * piece.gap_bytes);
  expect(kDeltaValues, piece.kind == DeltaKind::kWhole ? bytes : 0, bytes);
}

const DeltaTensor* DeltaFile::find(const std::string& key,
                                   std::optional<uint32_t> DeltaTensor::* in) const {
  for (const DeltaTensor& tensor :
       std::ranges::equal_range(index_.tensors, key, {}, &DeltaTensor::key)) {
    if (tensor.*in) return &tensor;
  }
  return nullptr;
}

const DeltaTensor* DeltaFile::in_base(const std::string& key) const {
  return find(key, &DeltaTensor::before);
}

const DeltaTensor* DeltaFile::in_result(const std::string& key) const {
  return find(key, &DeltaTensor::after);
}

DeltaFile::Payload DeltaFile::read(const DeltaTensor& tensor, const DeltaPiece& piece) const {
  const auto read_entry = [&](std::string_view suffix) {
    const auto& at = entry(tensor, piece, suffix);
    const ReadableFile& file = *files_.find(piece.file)->second.file;
    return read_range(*storage_, file, at.begin, at.end, deadline_);
  };
  Payload payload;
  if (piece.kind == DeltaKind::kSparse) payload.positions = read_entry(kDeltaPositions);
  payload.values = read_entry(piece.kind == DeltaKind::kXor ? kDeltaXor : kDeltaValues);
  const uint32_t found = crc32(payload.values, crc32(payload.positions));
  if (found == piece.crc32) return payload;
  throw Error(ErrorCode::kCorrupt,
              fmt::format("the delta is damaged: the CRC-32 of {} is {:08x}, expected {:08x}",
                          to_string(piece.box), found, piece.crc32))
      .with_key(tensor.key)
      .with_file(piece.file.empty() ? place_ : piece.file);
}

void DeltaFile::apply(const DeltaTensor& tensor, const Box& box, MutableByteView elements) const {
  for (const DeltaPiece& piece : tensor.pieces) {
    if (intersects(piece.box, box)) apply(tensor, piece, box, elements);
  }
}

void DeltaFile::apply(const DeltaTensor& tensor, const DeltaPiece& piece, const Box& box,
                      MutableByteView elements) const {
  const uint64_t item = itemsize(tensor.dtype);
  const Payload payload = read(tensor, piece);
  const auto patch = [&](MutableByteView bytes) {
    apply_piece(piece.kind, piece.gap_bytes, payload.positions, payload.values, bytes, item);
  };
  const uint64_t size = static_cast<uint64_t>(piece.box.numel()) * item;
  const auto place =
      box.contains(piece.box) ? place_if_contiguous(piece.box, box, item) : std::nullopt;
  if (place) return patch(elements.subspan(*place, size));
  // Elements of the piece that are not in the box are made and left.
  Bytes copy(size);
  const Box common = *intersect(piece.box, box);
  const StridedView here = StridedView::contiguous(elements.data(), box.shape, item)
                               .narrow(relative_to(common, box.offset));
  const StridedView there = StridedView::contiguous(copy.data(), piece.box.shape, item)
                                .narrow(relative_to(common, piece.box.offset));
  strided_copy(there, here);
  patch(copy);
  strided_copy(here, there);
}

void DeltaFile::verify(ThreadPool& threads, const Wanted& wanted) const {
  std::vector<std::pair<const DeltaTensor*, const DeltaPiece*>> pieces;
  for (const DeltaTensor& tensor : index_.tensors) {
    for (const DeltaPiece& piece : tensor.pieces) {
      if (wanted == nullptr || wanted(tensor, piece.box)) pieces.emplace_back(&tensor, &piece);
    }
  }
  threads.parallel_for(pieces.size(), [&](size_t i) {
    const auto& [tensor, piece] = pieces[i];
    const Payload payload = read(*tensor, *piece);
    const uint64_t item = itemsize(tensor->dtype);
    check_piece(piece->kind, piece->gap_bytes, payload.positions, payload.values,
                static_cast<uint64_t>(piece->box.numel()), item);
  });
}

}  // namespace tilestone::engine
