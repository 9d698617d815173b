#include "tilestone/engine/write/earlier_step_internal.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/error.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/format/manifest.h"

namespace tilestone::engine {
namespace {

// Of a larger manifest a rank reads its own receipt only, so that many ranks don't read all of it.
constexpr uint64_t kReadWhole = 4u << 20;  // bytes

Bytes read_range(Storage& storage, const ReadableFile& file, uint64_t offset, uint64_t size,
                 const Deadline& deadline) {
  if (offset > file.size() || size > file.size() - offset) {
    throw Error(ErrorCode::kCorrupt, "the manifest is shorter than it says").with_file(file.name());
  }
  Bytes bytes(size);
  const ReadOp op{&file, offset, size, bytes.data()};
  storage.read({&op, 1}, {nullptr, nullptr, deadline}, [](size_t, ByteView) {});
  return bytes;
}

std::vector<Receipt> read_receipts(Storage& storage, const std::string& name, int rank,
                                   const Deadline& deadline) {
  const auto file = storage.open(name);
  const auto read = [&](uint64_t offset, uint64_t size) {
    return read_range(storage, *file, offset, size, deadline);
  };
  if (file->size() <= kReadWhole) {
    return std::move(Manifest::decode(read(0, file->size()), name).receipts);
  }
  const uint64_t head = manifest_head_bytes(read(0, kManifestStart), name);
  const ManifestTable table = decode_manifest_table(read(0, head), name);
  const auto own = static_cast<size_t>(rank);
  if (own >= table.receipts.size()) return {};
  const ManifestTable::Range& range = table.receipts[own];
  std::vector<Receipt> receipts;
  receipts.push_back(receipt_in(table, own, read(range.offset, range.size), name));
  return receipts;
}

std::vector<Receipt> read_any_manifest(Storage& storage, int rank, const Deadline& deadline) {
  for (const std::string& name : storage.list_files(std::string(kTilestoneDirectory) + "/")) {
    if (kind_of(name) == kManifestKind) return read_receipts(storage, name, rank, deadline);
  }
  throw Error(ErrorCode::kNotFound, "there is no manifest at " + storage.describe());
}

}  // namespace

std::optional<EarlierStep> EarlierStep::read(const Location& location, int rank,
                                             Deadline deadline) {
  const std::shared_ptr<Storage> storage = location.shared()->until(deadline);
  try {
    return EarlierStep(storage, rank, read_any_manifest(*storage, rank, deadline));
  } catch (const Error& error) {
    static_cast<void>(deadline.expired());  // throws the interrupt's reason
    if (error.code() == ErrorCode::kTimeout) throw;
    log(LogLevel::kWarning, "nothing is reused, everything is written: " + error.message());
    return std::nullopt;
  }
}

EarlierStep::EarlierStep(std::shared_ptr<Storage> storage, int rank, std::vector<Receipt> receipts)
    : storage_(std::move(storage)) {
  std::ranges::stable_partition(receipts, [&](const Receipt& each) { return each.rank == rank; });
  for (Receipt& each : receipts) {
    receipts_.push_back(std::make_unique<const Receipt>(std::move(each)));
    const Receipt& receipt = *receipts_.back();
    const auto first = static_cast<uint32_t>(files_.size());
    files_.insert(files_.end(), receipt.files.begin(), receipt.files.end());
    const auto add = [&](ByKey& to, const std::vector<Receipt::Chunk>& chunks) {
      for (const Receipt::Chunk& chunk : chunks) {
        to[receipt.tensors[chunk.tensor].key].push_back({&receipt, &chunk, first});
      }
    };
    add(chunks_, receipt.chunks);
    if (receipt.rank == rank) add(copies_, receipt.copies);
  }
}

const EarlierStep::Chunk* EarlierStep::find(const ByKey& chunks, std::string_view key,
                                            const Box& box) {
  const auto found = chunks.find(key);
  if (found == chunks.end()) return nullptr;
  for (const Chunk& each : found->second) {
    if (each.chunk->box == box) return &each;
  }
  return nullptr;
}

std::optional<EarlierItem> EarlierStep::find(std::string_view key, DType dtype,
                                             const Dims& global_shape, const Box& box,
                                             bool copy) const {
  const Chunk* const found = find(copy ? copies_ : chunks_, key, box);
  if (found == nullptr) return std::nullopt;
  const Receipt::Tensor& tensor = found->receipt->tensors[found->chunk->tensor];
  if (tensor.dtype != dtype || tensor.global_shape != global_shape) return std::nullopt;
  EarlierItem item{found->first_file + found->chunk->at.file, found->chunk->at};
  const uint64_t bytes = static_cast<uint64_t>(box.numel()) * itemsize(dtype);
  if (bytes <= BlockSums::kLeastBlock || item.at.checksums.blocks != nullptr) return item;
  // A receipt does not repeat the blocks of a chunk for its copies.
  const Chunk* const original = copy ? find(chunks_, key, box) : nullptr;
  if (original == nullptr) return std::nullopt;
  item.at.checksums.blocks = original->chunk->at.checksums.blocks;
  return item.at.checksums.blocks == nullptr ? std::nullopt : std::optional(item);
}

bool EarlierStep::link(uint32_t file, Storage& to, const std::string& name,
                       const Deadline& deadline) const {
  const ReceiptFile& known = files_.at(file);
  const auto info = storage_->stat(known.name);
  if (!info || !info->regular || info->size != known.size) return false;
  return to.link({storage_, known.name}, name, deadline);
}

}  // namespace tilestone::engine
