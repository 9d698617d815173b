// For each wanted piece, the stored chunks that share elements with it are the candidates. If they
// overlap, each element is read from the first candidate in this order: larger common part, then
// file and offset. A candidate only gives elements that no earlier one gave. So the boxes read are
// disjoint, and the sum of their volumes tells whether they are complete.
#include "tilestone/plan/load_plan.h"

#include <algorithm>
#include <optional>

#include "tilestone/base/dtype.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/geometry/box_index.h"
#include "tilestone/geometry/coverage.h"
#include "tilestone/plan/texts_internal.h"

namespace tilestone {
namespace {

// A tensor with fewer chunks, or wanted in fewer pieces, is searched linearly.
constexpr size_t kIndexedChunks = 64;
constexpr size_t kIndexedPieces = 4;

Hint hint_for(const Metadata& metadata, const std::string& key) {
  if (metadata.find_object(key) != nullptr) {
    return {{"the checkpoint has an object under this key"}};
  }
  std::string hint;
  for (const std::string& other : similar_keys(metadata, key)) {
    hint += (hint.empty() ? "did you mean \"" : "\", \"") + other;
  }
  return {{hint.empty() ? "the checkpoint has no similar key" : hint + "\"?"},
          {"", "differences.not_in_checkpoint", "report", " loads the others"}};
}

void check_match(const TensorItem& item, const StoredTensor& stored,
                 const LoadPlanOptions& options) {
  const bool convertible = is_convertible(stored.dtype, item.dtype);
  const bool same_dims = stored.shape.size() == item.global_shape.size();
  const bool fits = item.global_shape == stored.shape || (item.allow_shape_mismatch && same_dims);
  if (item.dtype != stored.dtype && !(options.cast && convertible)) {
    const std::string none = convertible ? "" : ", and there is no conversion between these dtypes";
    throw Error(options.cast ? ErrorCode::kUnsupported : ErrorCode::kMismatch,
                "the checkpoint has " + described(stored.dtype, stored.shape) + ", but " +
                    described(item.dtype, item.global_shape) + " is wanted" + none)
        .with_key(item.key)
        .with_reason(Reason::kDtypeDiffers)
        .with_hint(convertible && fits ? Hint{{"", "cast", "true", " converts the dtype"}}
                                       : Hint());
  }
  if (fits) return;
  const Advice leaves{"", "differences.other_shape", "report", " leaves the tensor as it is"};
  throw Error(ErrorCode::kMismatch, "the checkpoint has global shape " + to_string(stored.shape) +
                                        ", but " + to_string(item.global_shape) + " is wanted")
      .with_key(item.key)
      .with_reason(Reason::kShapeDiffers)
      .with_hint(same_dims ? Hint{{"a ShardedTensor with ", "allow_shape_mismatch", "true",
                                   " reads the common part and zero-fills the rest"},
                                  leaves}
                           : Hint{leaves});
}

// A chunk of the tensor that shares elements with the wanted box.
struct Candidate {
  uint32_t chunk = 0;
  Box common;
  int64_t volume = 0;
};

class TensorReads {
 public:
  TensorReads(uint32_t item_index, const TensorItem& item, uint32_t tensor_index,
              const StoredTensor& tensor)
      : item_index_(item_index), item_(item), tensor_index_(tensor_index), tensor_(tensor) {
    boxes_.reserve(tensor.chunks.size());
    for (const StoredChunk& chunk : tensor.chunks) {
      check_stored(chunk.box);
      boxes_.push_back(chunk.box);
    }
    if (boxes_.size() >= kIndexedChunks && item.pieces.size() >= kIndexedPieces) {
      index_.emplace(boxes_);
    }
  }

  void add(uint32_t piece, LoadPlan& plan) {
    const Box& box = item_.pieces[piece].box;
    with_key(item_.key, [&] { check_bounds(box, item_.global_shape); });
    if (box.empty()) return;
    const Box stored = Box::whole(tensor_.shape);
    for (Box& rest : subtract(box, stored)) {
      plan.fills.push_back({item_index_, piece, std::move(rest)});
    }
    if (const auto common = intersect(box, stored)) read(piece, *common, plan);
  }

 private:
  // The metadata comes from a file. The code below requires every box to lie inside its tensor.
  void check_stored(const Box& box) const {
    try {
      check_bounds(box, tensor_.shape);
    } catch (const Error& error) {
      throw Error(ErrorCode::kCorrupt, "the checkpoint's metadata: " + error.message())
          .with_key(tensor_.key);
    }
  }

  void read(uint32_t piece, const Box& wanted, LoadPlan& plan) const {
    std::vector<Candidate> found = candidates(wanted);
    int64_t missing = wanted.numel();
    for_each_part(found, [&](const Candidate& from, Box part) {
      missing -= part.numel();
      plan.reads.push_back({item_index_, piece, tensor_index_, from.chunk, std::move(part)});
    });
    if (missing == 0) return;
    const auto hole = with_key(item_.key, [&] { return find_uncovered(wanted, boxes_); });
    throw Error(ErrorCode::kCoverage, "the checkpoint does not hold box " +
                                          to_string(hole.value_or(wanted)) + " of the wanted box " +
                                          to_string(wanted))
        .with_key(item_.key);
  }

  // The candidates, in the order in which they are read.
  std::vector<Candidate> candidates(const Box& wanted) const {
    std::vector<Candidate> found;
    const auto visit = [&](size_t i) {
      const auto common = intersect(boxes_[i], wanted);
      if (common) found.push_back({static_cast<uint32_t>(i), *common, common->numel()});
      return true;
    };
    if (index_) {
      index_->query(wanted, visit);
    } else {
      for (size_t i = 0; i < boxes_.size(); ++i) visit(i);
    }
    std::sort(found.begin(), found.end(), [&](const Candidate& a, const Candidate& b) {
      if (a.volume != b.volume) return a.volume > b.volume;
      const ItemLocation& x = tensor_.chunks[a.chunk].at;
      const ItemLocation& y = tensor_.chunks[b.chunk].at;
      if (x.file != y.file) return x.file < y.file;
      return x.offset != y.offset ? x.offset < y.offset : a.chunk < b.chunk;
    });
    return found;
  }

  // Calls emit(candidate, box) for disjoint boxes that together contain all elements of the
  // candidates.
  template <typename Emit>
  static void for_each_part(std::vector<Candidate>& found, const Emit& emit) {
    drop_replicas(found);
    std::vector<Box> boxes;
    for (const Candidate& candidate : found) boxes.push_back(candidate.common);
    if (boxes.size() < 2 || !find_overlap(boxes)) {
      for (const Candidate& candidate : found) emit(candidate, candidate.common);
      return;
    }
    const BoxIndex index(boxes);
    for (size_t i = 0; i < found.size(); ++i) {
      for (Box& part : not_yet_read(index, boxes, i)) emit(found[i], std::move(part));
    }
  }

  // Keeps only the first of the candidates with the same common part.
  static void drop_replicas(std::vector<Candidate>& found) {
    std::vector<size_t> order(found.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      if (found[a].common != found[b].common) return found[a].common < found[b].common;
      return a < b;
    });
    std::vector<bool> drop(found.size(), false);
    for (size_t i = 1; i < order.size(); ++i) {
      drop[order[i]] = found[order[i]].common == found[order[i - 1]].common;
    }
    size_t at = 0;
    std::erase_if(found, [&](const Candidate&) { return drop[at++]; });
  }

  // boxes[i] without the elements of earlier boxes.
  static std::vector<Box> not_yet_read(const BoxIndex& index, const std::vector<Box>& boxes,
                                       size_t i) {
    std::vector<Box> parts = {boxes[i]};
    index.query(boxes[i], [&](size_t earlier) {
      if (earlier >= i) return true;
      std::vector<Box> rest;
      for (const Box& part : parts) {
        for (Box& left : subtract(part, boxes[earlier])) rest.push_back(std::move(left));
      }
      parts = std::move(rest);
      return !parts.empty();
    });
    return parts;
  }

  uint32_t item_index_;
  const TensorItem& item_;
  uint32_t tensor_index_;
  const StoredTensor& tensor_;
  std::vector<Box> boxes_;
  std::optional<BoxIndex> index_;
};

// The usual case, which needs no search: one piece that is the whole tensor, stored as one chunk.
bool is_one_chunk(const TensorItem& item, const StoredTensor& stored) {
  if (item.pieces.size() != 1 || stored.chunks.size() != 1) return false;
  const Box& box = item.pieces[0].box;
  return box == stored.chunks[0].box && box == Box::whole(stored.shape) &&
         item.global_shape == stored.shape && !box.empty();
}

void sort_by_place(std::vector<ChunkRead>& reads, const Metadata& metadata) {
  const auto place = [&](const ChunkRead& read) -> const ItemLocation& {
    return metadata.tensors[read.tensor].chunks[read.chunk].at;
  };
  const auto before = [&](const ChunkRead& a, const ChunkRead& b) {
    const ItemLocation& x = place(a);
    const ItemLocation& y = place(b);
    if (x.file != y.file) return x.file < y.file;
    if (x.offset != y.offset) return x.offset < y.offset;
    if (a.item != b.item) return a.item < b.item;
    if (a.piece != b.piece) return a.piece < b.piece;
    return a.box < b.box;
  };
  // No sorting is needed if the state has the same order as the one that was saved.
  if (!std::is_sorted(reads.begin(), reads.end(), before)) {
    std::sort(reads.begin(), reads.end(), before);
  }
}

}  // namespace

LoadPlan plan_load(std::span<const TensorItem> wanted, const Metadata& metadata,
                   const LoadPlanOptions& options) {
  LoadPlan plan;
  plan.reads.reserve(wanted.size());
  size_t next = 0;  // keys are usually in the same order as in the metadata
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    const TensorItem& item = wanted[i];
    const bool follows = next < metadata.tensors.size() && metadata.tensors[next].key == item.key;
    const StoredTensor* stored = follows ? &metadata.tensors[next] : metadata.find_tensor(item.key);
    if (stored == nullptr) {
      const StoredObject* object = metadata.find_object(item.key);
      if (object != nullptr) expect_supported(*object);
      throw Error(ErrorCode::kNotFound, "the tensor is not in the checkpoint")
          .with_key(item.key)
          .with_reason(metadata.find_object(item.key) != nullptr ? Reason::kObjectStored
                                                                 : Reason::kKeyNotStored)
          .with_hint(hint_for(metadata, item.key));
    }
    check_match(item, *stored, options);
    const auto tensor = static_cast<uint32_t>(stored - metadata.tensors.data());
    next = tensor + size_t{1};
    if (is_one_chunk(item, *stored)) {
      plan.reads.push_back({i, 0, tensor, 0, item.pieces[0].box});
      continue;
    }
    TensorReads reads(i, item, tensor, *stored);
    for (uint32_t p = 0; p < item.pieces.size(); ++p) reads.add(p, plan);
  }
  sort_by_place(plan.reads, metadata);
  return plan;
}

}  // namespace tilestone
