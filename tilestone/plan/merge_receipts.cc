#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/plan/held.h"
#include "tilestone/plan/planner_internal.h"
#include "tilestone/plan/receipt.h"
#include "tilestone/plan/texts_internal.h"
#include "tilestone/version.h"

namespace tilestone {
namespace {

// Throws unless they are all the receipts of one save, by rank.
void expect_one_save(std::span<const Receipt> receipts) {
  if (receipts.empty()) throw Error(ErrorCode::kInvalidArgument, "there are no receipts");
  const Receipt& first = receipts.front();
  for (size_t rank = 0; rank < static_cast<size_t>(first.world_size); ++rank) {
    const bool is_there = rank < receipts.size();
    const Receipt& receipt = receipts[is_there ? rank : 0];
    if (is_there && receipt.rank == static_cast<int>(rank) && receipt.save_id == first.save_id &&
        receipt.world_size == first.world_size) {
      continue;
    }
    throw Error(ErrorCode::kInvalidArgument, "the receipt of rank " + std::to_string(rank) +
                                                 " of " + std::to_string(first.world_size) +
                                                 " is missing, or is of another save")
        .with_rank(static_cast<int>(rank));
  }
}

class ReceiptMerger {
 public:
  explicit ReceiptMerger(CopyPolicy policy) : policy_(policy) {}

  Metadata merge(std::span<Receipt> receipts) {
    metadata_.save_id = receipts.front().save_id;
    metadata_.writer = writer_name();
    for (Receipt& receipt : receipts) add(receipt);
    for (size_t t = 0; t < metadata_.tensors.size(); ++t) finish(t);
    metadata_.index();
    place_copies();
    check_object_copies();
    return std::move(metadata_);
  }

 private:
  struct Copy {
    std::string key;
    Box box;
    ItemLocation at;
    int rank = 0;
  };

  // Moves keys, paths and boxes out of the receipt.
  void add(Receipt& receipt) {
    first_file_ = static_cast<uint32_t>(metadata_.files.size());
    for (const ReceiptFile& file : receipt.files) {
      const auto [other, is_new] = writers_.emplace(file.name, receipt.rank);
      if (!is_new) {
        throw Error(
            ErrorCode::kInvalidArgument,
            rank_text(other->second) + " and " + rank_text(receipt.rank) + " report the same file")
            .with_file(file.name);
      }
      metadata_.files.push_back(file.name);
    }
    std::vector<uint32_t> tensors;
    tensors.reserve(receipt.tensors.size());
    tensors_.reserve(tensors_.size() + receipt.tensors.size());
    for (Receipt::Tensor& tensor : receipt.tensors) {
      tensors.push_back(tensor_of(receipt, tensor));
    }
    for (Receipt::Chunk& chunk : receipt.chunks) {
      const uint32_t t = tensors.at(chunk.tensor);
      metadata_.tensors[t].chunks.push_back(
          {std::move(chunk.box), location(receipt, chunk.at, metadata_.tensors[t].key)});
      ranks_[t].push_back(receipt.rank);
    }
    for (Receipt::Chunk& copy : receipt.copies) {
      const std::string& key = metadata_.tensors[tensors.at(copy.tensor)].key;
      copies_.push_back({key, std::move(copy.box), location(receipt, copy.at, key), receipt.rank});
    }
    for (Receipt::Object& object : receipt.objects) add(receipt, object);
    for (Receipt::Object& copy : receipt.object_copies) {
      const ItemLocation at = location(receipt, copy.at, copy.key);
      object_copies_.push_back({std::move(copy.key), {}, at, receipt.rank});
    }
    add_keys(metadata_.dict_keys, receipt.dict_keys);
    for (auto& [tensor, attributes] : receipt.attributes) {
      add_attributes(receipt.rank, metadata_.tensors[tensors.at(tensor)].key, attributes);
    }
  }

  // Contents are not compared here. Ranks may have different objects under one key; the lowest
  // rank's object is the checkpoint's. The reader of the manifest compares the contents.
  void check_object_copies() const {
    for (const Copy& copy : object_copies_) {
      const StoredObject* object = metadata_.find_object(copy.key);
      const bool missing = object == nullptr;
      if (!missing && object->at.file != copy.at.file) continue;
      throw Error(missing ? ErrorCode::kCoverage : ErrorCode::kInvalidArgument,
                  rank_text(copy.rank) + " reports a copy of an object " +
                      (missing ? "that no rank wrote"
                               : "that is in the same file as the object itself, " +
                                     metadata_.files[copy.at.file]))
          .with_key(copy.key)
          .with_rank(copy.rank);
    }
  }

  void add_attributes(int rank, const std::string& key, Attributes& attributes) {
    Attributes& known = metadata_.attributes[key];
    for (auto& [name, value] : attributes) {
      const auto [found, is_new] = known.try_emplace(name, std::move(value));
      const auto first = attribute_ranks_.try_emplace({key, name}, rank).first;
      if (is_new || found->second == value) continue;
      throw Error(ErrorCode::kMismatch,
                  rank_text(first->second) + " and " + rank_text(rank) +
                      " give the tensor's attribute \"" + name + "\" different values, " +
                      to_string(found->second, 100) + " and " + to_string(value, 100))
          .with_key(key)
          .with_rank(rank);
    }
  }

  ItemLocation location(const Receipt& receipt, const ReceiptItem& item,
                        const std::string& key) const {
    const bool known = item.file < receipt.files.size();
    const uint64_t size = known ? receipt.files[item.file].size : 0;
    if (!known || item.offset > size || item.length > size - item.offset) {
      throw Error(ErrorCode::kInvalidArgument,
                  "an item of " + std::to_string(item.length) + " bytes at offset " +
                      std::to_string(item.offset) + " is outside its file of " +
                      std::to_string(size) + " bytes")
          .with_key(key)
          .with_file(known ? receipt.files[item.file].name : "")
          .with_rank(receipt.rank);
    }
    return {first_file_ + item.file, Codec::kNone, item.offset, item.length, item.checksums};
  }

  uint32_t tensor_of(const Receipt& receipt, Receipt::Tensor& tensor) {
    const auto next = static_cast<uint32_t>(metadata_.tensors.size());
    const auto [known, is_new] = tensors_.emplace(tensor.key, next);
    if (is_new) {
      refuse_as_both(tensor.key, objects_, "an object", receipt.rank);
      metadata_.tensors.push_back({std::move(tensor.key),
                                   std::move(tensor.path),
                                   tensor.dtype,
                                   std::move(tensor.global_shape),
                                   {}});
      metadata_.tensors.back().order = tensor.order;
      ranks_.emplace_back();
      first_ranks_.push_back(receipt.rank);
      return next;
    }
    StoredTensor& stored = metadata_.tensors[known->second];
    if (stored.dtype != tensor.dtype || stored.shape != tensor.global_shape) {
      throw Error(ErrorCode::kMismatch,
                  "two ranks disagree on a tensor: " + rank_text(first_ranks_[known->second]) +
                      " has " + std::string(to_string(stored.dtype)) + " " +
                      to_string(stored.shape) + ", " + rank_text(receipt.rank) + " has " +
                      std::string(to_string(tensor.dtype)) + " " + to_string(tensor.global_shape))
          .with_key(tensor.key);
    }
    if (stored.path.empty()) stored.path = std::move(tensor.path);
    return known->second;
  }

  void add(const Receipt& receipt, Receipt::Object& object) {
    const auto [other, is_new] = objects_.emplace(object.key, static_cast<uint32_t>(receipt.rank));
    if (!is_new) {
      throw Error(ErrorCode::kCoverage, "an object is written twice, by " +
                                            rank_text(static_cast<int>(other->second)) +
                                            " and by " + rank_text(receipt.rank))
          .with_key(object.key);
    }
    refuse_as_both(object.key, tensors_, "a tensor", receipt.rank);
    const ItemLocation at = location(receipt, object.at, object.key);
    metadata_.objects.push_back({std::move(object.key), std::move(object.path), at});
    metadata_.objects.back().order = object.order;
  }

  static void refuse_as_both(const std::string& key,
                             const std::unordered_map<std::string, uint32_t>& others,
                             const char* kind, int rank) {
    if (!others.contains(key)) return;
    throw Error(ErrorCode::kMismatch,
                rank_text(rank) + " uses a key that is also the key of " + kind)
        .with_key(key);
  }

  // Sorts a tensor's chunks by box and checks that they tile it.
  void finish(size_t t) {
    StoredTensor& tensor = metadata_.tensors[t];
    const std::vector<int>& ranks = ranks_[t];
    const bool whole =
        tensor.chunks.size() == 1 && tensor.chunks[0].box == Box::whole(tensor.shape);
    if (whole) return;  // the usual case; includes one empty chunk of a tensor without elements
    std::vector<uint32_t> order(tensor.chunks.size());
    std::iota(order.begin(), order.end(), 0);
    if (numel(tensor.shape) == 0) {
      if (policy_ != CopyPolicy::kAccept && order.size() > 1)
        order.erase(order.begin() + 1, order.end());  // all but the lowest rank's
    } else {
      std::erase_if(order, [&](uint32_t i) { return tensor.chunks[i].box.empty(); });
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return tensor.chunks[a].box < tensor.chunks[b].box;
    });
    if (policy_ == CopyPolicy::kAccept) make_copies_of_equal_boxes(tensor, ranks, order);
    planner::Chunks written;
    std::vector<StoredChunk> chunks;
    for (uint32_t i : order) {
      written.boxes.push_back(tensor.chunks[i].box);
      written.ranks.push_back(static_cast<uint32_t>(ranks[i]));
      chunks.push_back(std::move(tensor.chunks[i]));
    }
    tensor.chunks = std::move(chunks);
    planner::expect_tiling(tensor.key, tensor.shape, written, " wrote ");
  }

  // Keeps the first of the chunks with the same box, which are in the order of ranks, and makes the
  // others copies.
  void make_copies_of_equal_boxes(StoredTensor& tensor, const std::vector<int>& ranks,
                                  std::vector<uint32_t>& order) {
    std::vector<uint32_t> kept;
    for (const uint32_t i : order) {
      if (kept.empty() || tensor.chunks[kept.back()].box != tensor.chunks[i].box) {
        kept.push_back(i);
      } else {
        copies_.push_back(
            {tensor.key, std::move(tensor.chunks[i].box), tensor.chunks[i].at, ranks[i]});
      }
    }
    order = std::move(kept);
  }

  // Finds the chunk that each copy is a copy of.
  void place_copies() {
    std::sort(copies_.begin(), copies_.end(), [](const Copy& a, const Copy& b) {
      return std::tie(a.key, a.box, a.at.file) < std::tie(b.key, b.box, b.at.file);
    });
    for (size_t begin = 0, end = 0; begin < copies_.size(); begin = end) {
      const StoredTensor& tensor = *metadata_.find_tensor(copies_[begin].key);
      const ChunksByBox chunks(tensor);
      for (; end < copies_.size() && copies_[end].key == tensor.key; ++end) {
        place_copy(copies_[end], tensor, chunks);
      }
    }
  }

  void place_copy(const Copy& copy, const StoredTensor& tensor, const ChunksByBox& chunks) {
    const auto refuse = [&](ErrorCode code, const std::string& problem,
                            const std::string& hint = "") {
      throw Error(code,
                  rank_text(copy.rank) + " reports a copy of box " + to_string(copy.box) + problem)
          .with_key(copy.key)
          .with_rank(copy.rank)
          .with_hint(hint);
    };
    const auto found = chunks.find(copy.box);
    if (!found) refuse(ErrorCode::kCoverage, ", which no rank wrote as a chunk");
    const ItemLocation& chunk = tensor.chunks[*found].at;
    const std::string& file = metadata_.files[chunk.file];
    if (chunk.file == copy.at.file) {
      refuse(ErrorCode::kInvalidArgument, " that is in the same file as the chunk itself, " + file);
    }
    if (chunk.checksums->payload_crc32 != copy.at.checksums->payload_crc32) {
      refuse(
          ErrorCode::kMismatch,
          " with different elements than " + rank_text(writers_.at(file)) +
              " wrote: data that differs between ranks needs a separate "
              "key on each rank",
          "parts of one tensor on disjoint meshes (expert weights): ShardedTensor.from_param, see "
          "docs/placements.md");
    }
    const auto t = static_cast<uint32_t>(&tensor - metadata_.tensors.data());
    metadata_.copies.push_back({t, *found, copy.at});
    if (chunk.checksums->blocks) {  // the same payload has the same blocks
      metadata_.copies.back().at.checksums->blocks = chunk.checksums->blocks;
    }
  }

  const CopyPolicy policy_;
  Metadata metadata_;
  std::vector<Copy> copies_;
  std::vector<Copy> object_copies_;                                     // without boxes
  std::map<std::pair<std::string, std::string>, int> attribute_ranks_;  // by key and name
  std::vector<std::vector<int>> ranks_;  // by tensor and chunk: the rank that wrote it
  std::vector<int> first_ranks_;         // by tensor: the first rank that reports it
  std::unordered_map<std::string, uint32_t> tensors_;
  std::unordered_map<std::string, uint32_t> objects_;  // by key: the rank that wrote it
  std::unordered_map<std::string, int> writers_;       // by file name: the rank that wrote it
  uint32_t first_file_ = 0;
};

}  // namespace

Metadata merge_receipts(std::vector<Receipt> receipts, CopyPolicy copies) {
  expect_one_save(receipts);
  Metadata merged = ReceiptMerger(copies).merge(receipts);
  expect_holders_have_the_same(receipts);  // last, because it names no key
  return merged;
}

}  // namespace tilestone
