#include "tilestone/engine/delta/delta_file_internal.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
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

void read_ops(Storage& storage, std::span<const ReadOp> ops, const Deadline& deadline,
              ThreadPool* threads = nullptr) {
  ReadOptions options;
  options.threads = threads;
  options.buffers = BufferPool::create(BufferPool::kDefaultBuffer);
  options.deadline = deadline;
  options.cache = CachePolicy::kKeep;
  storage.read(ops, options, [](size_t, ByteView) {});
}

Bytes read_range(Storage& storage, const ReadableFile& file, uint64_t begin, uint64_t end,
                 const Deadline& deadline) {
  Bytes bytes(end - begin);
  const ReadOp op{&file, begin, bytes.size(), bytes.data()};
  if (!bytes.empty()) read_ops(storage, {&op, 1}, deadline);
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

void DeltaBody::add(ShardSum& sum, const Box& box, const EncodedPiece& encoded, ByteView now) {
  DeltaPiece& piece = sum.pieces.emplace_back(DeltaPiece{box, encoded.kind, encoded.gap_bytes});
  piece.file = file_;
  const std::string name = delta_entry({sum.key, sum.dtype, sum.shape}, piece);
  const auto add_entry = [&](std::string_view suffix, DType dtype, ByteView bytes,
                             const Dims* shape) {
    const Dims flat{static_cast<int64_t>(bytes.size() / itemsize(dtype))};
    put(name + std::string(suffix), dtype, shape != nullptr ? *shape : flat, bytes);
    piece.crc32 = crc32(bytes, piece.crc32);
  };
  const bool named = has_name(sum.dtype);
  const DType dtype = named ? sum.dtype : DType::kUInt8;
  if (piece.kind == DeltaKind::kWhole) {
    return add_entry(kDeltaValues, dtype, now, named ? &box.shape : nullptr);
  }
  if (piece.kind == DeltaKind::kXor) {
    return add_entry(kDeltaXor, DType::kUInt8, encoded.values, nullptr);
  }
  const DType positions = piece.gap_bytes == 2 ? DType::kUInt16 : DType::kUInt8;
  add_entry(kDeltaPositions, positions, encoded.positions, nullptr);
  add_entry(kDeltaValues, dtype, encoded.values, nullptr);
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
  Headers headers;
  DeltaHeader& first = delta.open_file(name, "", headers);
  if (!first.index) {
    throw Error(ErrorCode::kUnsupported, "the safetensors file is no delta")
        .with_file(name)
        .with_hint("`tilestone delta A B PATH` makes one");
  }
  delta.index_ = *std::move(first.index);
  for (const DeltaTensor& tensor : delta.index_.tensors) {
    for (const DeltaPiece& piece : tensor.pieces) {
      const auto known = headers.find(piece.file);
      const DeltaHeader& header =
          known != headers.end() ? known->second : delta.open_file(piece.file, piece.file, headers);
      delta.entries_[&piece] = delta.entries_of(tensor, piece, header);
    }
  }
  return delta;
}

DeltaHeader& DeltaFile::open_file(const std::string& name, const std::string& as,
                                  Headers& headers) {
  constexpr uint64_t kBegin = safetensors::kLengthBytes;
  const ReadableFile& file = *(files_[as] = storage_->open(name));
  const uint64_t size = file.size();
  const Bytes first = read_range(*storage_, file, 0, std::min(size, kBegin), deadline_);
  const uint64_t end = kBegin + safetensors::header_length(first, size, name);
  bytes_ += size;
  return headers[as] =
             parse_delta_header(read_range(*storage_, file, kBegin, end, deadline_), size, name);
}

DeltaFile::Entries DeltaFile::entries_of(const DeltaTensor& tensor, const DeltaPiece& piece,
                                         const DeltaHeader& header) const {
  const auto elements = static_cast<uint64_t>(piece.box.numel());
  const uint64_t bytes = elements * itemsize(tensor.dtype);
  const auto entry = [&](std::string_view suffix, uint64_t least, uint64_t most) {
    const auto found = header.entries.find(delta_entry(tensor, piece) + std::string(suffix));
    const bool is_there = found != header.entries.end();
    const uint64_t size = is_there ? found->second.end - found->second.begin : 0;
    if (is_there && least <= size && size <= most) {
      return Entries::Entry{found->second.begin, found->second.end};
    }
    throw Error(ErrorCode::kCorrupt,
                is_there
                    ? fmt::format("the {}{} of a box of {} bytes has {} bytes in the delta; at "
                                  "most {} are expected",
                                  delta_entry(tensor, piece), suffix, bytes, size, most)
                    : fmt::format("the delta lacks the{} of {}", suffix, to_string(piece.box)))
        .with_key(tensor.key)
        .with_file(piece.file);
  };
  Entries found{&tensor, &piece, files_.find(piece.file)->second.get()};
  if (piece.kind == DeltaKind::kXor) {
    found.values = entry(kDeltaXor, 0, bytes + bytes / 64 + 4096);
    return found;
  }
  if (piece.kind == DeltaKind::kSparse) {
    found.positions = entry(kDeltaPositions, 0, elements * piece.gap_bytes);
  }
  found.values = entry(kDeltaValues, piece.kind == DeltaKind::kWhole ? bytes : 0, bytes);
  return found;
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

std::vector<Bytes> DeltaFile::read(std::span<Entries> entries, ThreadPool* threads) const {
  std::vector<std::pair<const ReadableFile*, Entries::Entry*>> all;
  for (Entries& each : entries) {
    for (Entries::Entry* const entry : {&each.positions, &each.values}) {
      if (entry->begin != entry->end) all.emplace_back(each.file, entry);
    }
  }
  std::ranges::sort(all, {},
                    [](const auto& each) { return std::tuple(each.first, each.second->begin); });
  std::vector<Bytes> memory;
  std::vector<ReadOp> ops;
  for (size_t first = 0, next = 0; first < all.size(); first = next) {
    const auto& [file, entry] = all[first];
    uint64_t end = entry->begin;  // entries one after the other are read at once
    for (; next < all.size() && all[next].first == file && all[next].second->begin == end; ++next) {
      end = all[next].second->end;
    }
    const Bytes& bytes = memory.emplace_back(end - entry->begin);
    ops.push_back({file, entry->begin, bytes.size(), memory.back().data()});
    for (size_t i = first; i < next; ++i) {
      Entries::Entry& each = *all[i].second;
      each.bytes = ByteView(bytes).subspan(each.begin - entry->begin, each.end - each.begin);
    }
  }
  read_ops(*storage_, ops, deadline_, threads);
  return memory;
}

void DeltaFile::check_crc(const Entries& entries) const {
  const DeltaPiece& piece = *entries.piece;
  const uint32_t found = crc32(entries.values.bytes, crc32(entries.positions.bytes));
  if (found == piece.crc32) return;
  throw Error(ErrorCode::kCorrupt,
              fmt::format("the delta is damaged: the CRC-32 of {} is {:08x}, expected {:08x}",
                          to_string(piece.box), found, piece.crc32))
      .with_key(entries.tensor->key)
      .with_file(piece.file.empty() ? place_ : piece.file);
}

void DeltaFile::apply(const DeltaTensor& tensor, const Box& box, MutableByteView elements) const {
  for (const DeltaPiece& piece : tensor.pieces) {
    if (!intersects(piece.box, box)) continue;
    Entries entries = entries_.at(&piece);
    std::vector<Bytes> memory;
    if (entries.values.bytes.empty()) {  // not kept
      memory = read({&entries, 1}, nullptr);
      check_crc(entries);
    }
    apply(entries, box, elements);
  }
}

void DeltaFile::apply(const Entries& entries, const Box& box, MutableByteView elements) const {
  const DeltaPiece& piece = *entries.piece;
  const uint64_t item = itemsize(entries.tensor->dtype);
  const auto patch = [&](MutableByteView bytes) {
    apply_piece(piece.kind, piece.gap_bytes, entries.positions.bytes, entries.values.bytes, bytes,
                item);
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

uint64_t DeltaFile::verify(ThreadPool& threads, uint64_t keep, const Wanted& wanted) {
  std::vector<Entries> pieces;
  uint64_t bytes = 0;
  for (const DeltaTensor& tensor : index_.tensors) {
    for (const DeltaPiece& piece : tensor.pieces) {
      if (wanted != nullptr && !wanted(tensor, piece.box)) continue;
      bytes += pieces.emplace_back(entries_.at(&piece)).size();
    }
  }
  const bool keeps = bytes <= std::min(keep, kMaxKept);  // then they are read at once
  std::vector<Bytes> memory;
  for (size_t first = 0, next = 0; first < pieces.size(); first = next) {
    for (uint64_t size = 0; next < pieces.size() && (keeps || size < kMaxKept); ++next) {
      size += pieces[next].size();
    }
    const std::span some = std::span(pieces).subspan(first, next - first);
    memory.clear();
    memory = read(some, &threads);
    threads.parallel_for(some.size(), [&](size_t i) {
      const auto& [tensor, piece, file, positions, values] = some[i];
      check_crc(some[i]);
      check_piece(piece->kind, piece->gap_bytes, positions.bytes, values.bytes,
                  static_cast<uint64_t>(piece->box.numel()), itemsize(tensor->dtype));
    });
  }
  if (!keeps) return 0;
  for (const Entries& each : pieces) entries_[each.piece] = each;
  kept_ = std::move(memory);
  return bytes;
}

}  // namespace tilestone::engine
