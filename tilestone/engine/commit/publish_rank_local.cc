// An ordinary save that replaces a rank-local checkpoint (old_checkpoint.cc), except that its
// data files are those of the replaced checkpoint. Where no receipts of ranks are left, because
// stock torch has made it, or it was copied without its hidden files, each rank's metadata is
// turned into the receipt that the rank would have left. It needs the size of each file and the
// checksums of each item, so all data is read once.
//
// A manifest states where the elements of an item begin, and implies that they are in C order. If
// an item of stock torch has them in another order, no manifest is published.
#include "tilestone/engine/commit/attempt_internal.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/error.h"
#include "tilestone/base/uuid.h"
#include "tilestone/engine/commit/describe_internal.h"
#include "tilestone/engine/commit/transaction_internal.h"
#include "tilestone/engine/open/description_internal.h"
#include "tilestone/engine/read/payloads_internal.h"
#include "tilestone/engine/read/range_reader_internal.h"
#include "tilestone/engine/run/options_internal.h"
#include "tilestone/engine/run/resources_internal.h"
#include "tilestone/format/manifest.h"
#include "tilestone/geometry/box.h"

namespace tilestone::engine {
namespace {

constexpr uint64_t kMaxReadBytes = 1u << 20;  // the most that one checksummed read takes

// Makes one rank's receipt from its metadata and the contents of its files.
class RankReader {
 public:
  RankReader(Storage& storage, const Format& format, const Metadata& metadata, ThreadPool& threads,
             Deadline deadline)
      : context_{storage,
                 format,
                 metadata,
                 make_pool(BufferPool::kDefaultTotal, threads.size(), metadata.tensor_bytes()),
                 threads,
                 true,
                 deadline},
        metadata_(metadata) {}

  // Whether the elements of all items are in C order, so that a manifest can describe them.
  bool in_c_order() const { return in_c_order_; }

  Receipt receipt(int rank, int world_size, const std::string& save_id) {
    Receipt made;
    made.rank = rank;
    made.world_size = world_size;
    made.save_id = save_id;
    for (uint32_t file = 0; file < metadata_.files.size(); ++file) {
      made.files.push_back({metadata_.files[file], open_data(context_, file)->size()});
    }
    made.dict_keys = metadata_.dict_keys;
    add_tensors(made);
    for (const StoredObject& object : metadata_.objects) {
      expect_plain(object.at, object.key);
      made.objects.push_back({object.key, object.path, item_of(object.at), 0, object.order});
    }
    for (size_t i = 0; i < made.chunks.size(); ++i) request(made.chunks[i].at, payloads_[i].size);
    for (Receipt::Object& object : made.objects) request(object.at, 0);
    sum();
    check_records(made);
    return made;
  }

 private:
  struct RecordedPayload {
    uint64_t size = 0;                   // bytes of the elements
    std::optional<uint32_t> crc32 = {};  // as recorded in the item itself
    ChunkRef chunk = {};
  };
  // A read for the checksum of an item, and for that of its elements if it is within them.
  struct SummedRead {
    ReceiptItem* item = nullptr;
    uint64_t within = 0;   // offset from the item's start, bytes
    uint64_t payload = 0;  // if within the elements: their size, bytes
  };

  void expect_plain(const ItemLocation& at, const std::string& key) const {
    if (at.codec == Codec::kNone) return;
    throw Error(ErrorCode::kUnsupported, "a manifest can't describe compressed items")
        .with_key(key)
        .with_file(metadata_.files[at.file])
        .with_hint("load the checkpoint, and save it");
  }

  static ReceiptItem item_of(const ItemLocation& at) { return {at.file, at.offset, at.length, {}}; }

  void add_tensors(Receipt& made) {
    std::vector<ChunkRef> refs;
    for (uint32_t t = 0; t < metadata_.tensors.size(); ++t) {
      const StoredTensor& tensor = metadata_.tensors[t];
      made.tensors.push_back({tensor.key, tensor.path, tensor.dtype, tensor.shape, tensor.order});
      for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
        expect_plain(tensor.chunks[c].at, tensor.key);
        made.chunks.push_back({t, tensor.chunks[c].box, item_of(tensor.chunks[c].at)});
        refs.push_back({t, c});
      }
    }
    const std::vector<StoredPayload> found = find_payloads(context_, refs);
    for (size_t i = 0; i < found.size(); ++i) {
      payloads_.push_back(payload_of(refs[i], found[i]));
      made.chunks[i].at.checksums.payload_offset = found[i].offset;
    }
  }

  // An item with its elements in another order gets no payload, so the checksum covers the whole
  // item: replicas are equal if their items are.
  RecordedPayload payload_of(ChunkRef ref, const StoredPayload& found) {
    const StoredTensor& tensor = metadata_.tensors[ref.tensor];
    const Box& box = tensor.chunks[ref.chunk].box;
    const RecordedPayload payload{
        static_cast<uint64_t>(box.numel()) * itemsize(tensor.dtype), {}, ref};
    if (payload.size == 0) return payload;
    if (found.dtype != tensor.dtype || !in_c_order(found)) {
      in_c_order_ = false;
      return {0, {}, ref};
    }
    const bool whole = found.record_offset == found.offset && found.record_size == payload.size;
    return {payload.size, whole ? found.record_crc32 : std::nullopt, ref};
  }

  // Ignores the strides of dims of size 1.
  static bool in_c_order(const StoredPayload& found) {
    const Dims expected = contiguous_strides(found.shape);
    for (size_t d = 0; d < found.shape.size(); ++d) {
      if (found.shape[d] != 1 && found.strides[d] != expected[d]) return false;
    }
    return true;
  }

  // Adds reads of the whole item. No read has both elements and other bytes, or bytes of two
  // blocks.
  void request(ReceiptItem& item, uint64_t payload_size) {
    const uint64_t begin = payload_size == 0 ? item.length : item.checksums.payload_offset;
    const uint64_t end = begin + payload_size;
    const uint64_t step = std::min<uint64_t>(kMaxReadBytes, context_.buffers->buffer_bytes() / 2);
    const auto cut = [&](uint64_t from, uint64_t to, bool of_payload) {
      for (uint64_t at = from; at < to; at += step) {
        reads_.push_back({&item, at, of_payload ? payload_size : 0});
        sizes_.push_back(std::min(step, to - at));
      }
    };
    cut(0, begin, false);
    const uint64_t block = block_bytes_for(payload_size);
    for (uint64_t at = begin; at < end; at += block) cut(at, std::min(end, at + block), true);
    cut(end, item.length, false);
  }

  // Makes all reads and sets the items' checksums. The reads of an item follow one another.
  void sum() {
    RangeReader reader(context_, &context_.threads);
    size_t first = 0;
    RecordSum of_item;
    std::optional<BlockSummer> of_payload;
    const auto read_batch = [&] {
      for (const ByteRange& range : reader.read()) {
        const SummedRead& read = reads_[first];
        ItemChecksums& sums = read.item->checksums;
        if (read.within == 0) of_item = RecordSum();
        if (read.within == 0) of_payload.reset();
        of_item.add(of_item.size(), range.size, range.crc32);
        if (read.payload > 0 && !of_payload) of_payload.emplace(read.payload);
        if (read.payload > 0) of_payload->add_crc(range.size, range.crc32);
        sums.item_crc32 = of_item.crc32();
        if (++first < reads_.size() && reads_[first].item == read.item) continue;
        sums.payload_crc32 = sums.item_crc32;
        if (of_payload) set_payload(of_payload->take(), sums);
      }
    };
    for (size_t i = 0; i < reads_.size(); ++i) {
      const SummedRead& read = reads_[i];
      reader.add({.file = read.item->file,
                  .begin = read.item->offset + read.within,
                  .size = sizes_[i],
                  .summed = true});
      if (reader.full()) read_batch();
    }
    read_batch();
  }

  static void set_payload(BlockSums blocks, ItemChecksums& sums) {
    sums.payload_crc32 = blocks.combined();
    if (blocks.crc32.size() > 1) sums.blocks = std::make_shared<const BlockSums>(std::move(blocks));
  }

  void check_records(const Receipt& made) const {
    for (size_t i = 0; i < made.chunks.size(); ++i) {
      const auto expected = payloads_[i].crc32;
      if (!expected) continue;
      expect_record(context_, payloads_[i].chunk, payloads_[i].size, *expected,
                    made.chunks[i].at.checksums.payload_crc32);
    }
  }

  const ReadContext context_;
  const Metadata& metadata_;
  std::vector<RecordedPayload> payloads_;  // by chunk
  std::vector<SummedRead> reads_;
  std::vector<uint64_t> sizes_;  // of the reads
  bool in_c_order_ = true;
};

// Finds the checkpoint. Error(kAlreadyExists) if it is not rank-local.
Found find_rank_local(const Location& location) {
  Found found = find_checkpoint(location.shared(), nullptr);
  if (found.description.metadata->rank_local) return found;
  throw Error(ErrorCode::kAlreadyExists,
              "the checkpoint at " + location.describe() + " is no longer a rank-local one");
}

void expect_unchanged(const Found& before, const Found& now) {
  if (before.description.files.contents == now.description.files.contents) return;
  throw Error(ErrorCode::kAlreadyExists, "the rank-local checkpoint at " + now.storage->describe() +
                                             " has been replaced while it was read")
      .with_hint("publish again");
}

struct ReadReceipts {
  std::vector<Receipt> receipts;  // by rank
  bool in_c_order = true;
  std::map<std::string, std::string> attributes = {};
};

// What the ranks have left. Of an object that several ranks have, the receipt of the lowest says so
// and those of the others have a copy (manifest_of_receipts()).
ReadReceipts receipts_of_manifest(const DescribingFiles& description, const std::string& save_id) {
  Manifest manifest = Manifest::decode(description.manifest, description.manifest_file);
  for (Receipt& receipt : manifest.receipts) {
    receipt.save_id = save_id;
    for (Receipt::Object& copy : receipt.object_copies) receipt.objects.push_back(std::move(copy));
    receipt.object_copies.clear();
  }
  return {std::move(manifest.receipts), true, std::move(manifest.attributes)};
}

ReadReceipts read_receipts(const Found& found, const std::string& save_id, int threads,
                           Deadline deadline) {
  if (!found.description.manifest.empty()) return receipts_of_manifest(found.description, save_id);
  const Format& format = *found.format.format;
  const DirectoryFiles& files = found.description.files;
  const auto world = static_cast<int>(format.rank_local_files(files.names).size());
  ThreadPool pool(thread_count(threads));
  ReadReceipts read;
  for (int rank = 0; rank < world; ++rank) {
    const Metadata metadata = format.parse_rank_index(files, rank);
    RankReader reader(*found.storage, format, metadata, pool, deadline);
    try {
      read.receipts.push_back(reader.receipt(rank, world, save_id));
    } catch (Error& error) {
      error.with_rank(rank);
      throw;
    }
    read.in_c_order = read.in_c_order && reader.in_c_order();
  }
  if (!read.in_c_order) {
    log(LogLevel::kWarning, "some tensors are not in C order in the files of " +
                                found.storage->describe() +
                                ", so the checkpoint is published without a manifest");
  }
  return read;
}

}  // namespace

bool is_rank_local_at(const Location& location) {
  try {
    return find_checkpoint(location.shared(), nullptr).description.metadata->rank_local;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    return false;
  }
}

std::string publish_rank_local(const Location& location, int threads, Deadline deadline,
                               Checks::Differing differing) {
  const std::string save_id = random_uuid();
  const Found found = find_rank_local(location);
  const Format& format = *found.format.format;
  ReadReceipts read = read_receipts(found, save_id, threads, deadline);
  DroppedObjects dropped = drop_equal_objects(read.receipts);
  if (dropped.rank >= 0 && differing == Checks::Differing::kError) {
    throw Error(ErrorCode::kMismatch, dropped.differing).with_rank(dropped.rank);
  }
  if (dropped.rank >= 0 && differing == Checks::Differing::kWarn) {
    log(LogLevel::kWarning, dropped.differing);
  }
  std::vector<Bytes> encoded;
  for (const Receipt& receipt : read.receipts) encoded.push_back(receipt.encode());
  SaveToIndex save{.receipts = std::move(read.receipts),
                   .encoded = encoded,
                   .copies = CopyPolicy::kAccept,
                   .attributes = std::move(read.attributes),
                   .of_dialect = found.format.dialect->encode_index(Items(), format),
                   .remains = std::move(dropped.remains)};
  describe_save(save, format, *found.format.dialect);  // refuses before anything is written
  Transaction transaction(location.shared(), found.format.format, found.format.dialect, save_id,
                          true);
  transaction.begin(deadline);
  try {
    expect_unchanged(found, find_rank_local(location));  // no other save can change it any more
    transaction.prepare({.save = std::move(save), .threads = threads, .manifest = read.in_c_order},
                        deadline);
    transaction.commit(deadline.without_interrupt());
  } catch (...) {
    if (!transaction.was_tried()) transaction.abandon(true);
    throw;
  }
  transaction.clean();
  return save_id;
}

}  // namespace tilestone::engine
