#include "tilestone/state/metadata.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tilestone/base/block_sums.h"
#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/state/similar_keys_internal.h"

namespace tilestone {
namespace {

template <typename Stored>
void sort_by_key(std::vector<Stored>& items) {
  const auto before = [](const Stored& a, const Stored& b) { return a.key < b.key; };
  if (!std::is_sorted(items.begin(), items.end(), before)) {
    std::sort(items.begin(), items.end(), before);
  }
  const auto twice = std::adjacent_find(
      items.begin(), items.end(), [](const Stored& a, const Stored& b) { return a.key == b.key; });
  if (twice != items.end()) {
    throw Error(ErrorCode::kCorrupt, "the checkpoint's metadata contains the key twice")
        .with_key(twice->key);
  }
}

template <typename Stored>
const Stored* find_in(const std::vector<Stored>& items, std::string_view key) {
  const auto found =
      std::lower_bound(items.begin(), items.end(), key,
                       [](const Stored& item, std::string_view k) { return item.key < k; });
  return found != items.end() && found->key == key ? &*found : nullptr;
}

}  // namespace

bool operator==(const ItemChecksums& a, const ItemChecksums& b) {
  if (a.blocks != b.blocks && (!a.blocks || !b.blocks || *a.blocks != *b.blocks)) return false;
  return a.payload_offset == b.payload_offset && a.payload_crc32 == b.payload_crc32 &&
         a.item_crc32 == b.item_crc32;
}

Dims item_shape(const StoredChunk& chunk) {
  return chunk.flat ? Dims{chunk.flat->elements} : chunk.box.shape;
}

uint64_t begin_in_item(const StoredChunk& chunk, DType dtype) {
  return chunk.flat ? static_cast<uint64_t>(chunk.flat->begin) * itemsize(dtype) : 0;
}

ChunksByBox::ChunksByBox(const StoredTensor& tensor)
    : tensor_(tensor), order_(tensor.chunks.size()) {
  std::iota(order_.begin(), order_.end(), 0u);
  std::sort(order_.begin(), order_.end(),
            [&](uint32_t a, uint32_t b) { return tensor_.chunks[a].box < tensor_.chunks[b].box; });
}

std::optional<uint32_t> ChunksByBox::find(const Box& box) const {
  const auto found =
      std::lower_bound(order_.begin(), order_.end(), box,
                       [&](uint32_t i, const Box& b) { return tensor_.chunks[i].box < b; });
  if (found == order_.end() || tensor_.chunks[*found].box != box) return std::nullopt;
  return *found;
}

void Metadata::index() {
  sort_by_key(tensors);
  sort_by_key(objects);
  for (const StoredObject& object : objects) {
    if (find_tensor(object.key) != nullptr) {
      throw Error(ErrorCode::kCorrupt,
                  "the checkpoint's metadata contains the key twice, as a tensor and as an object")
          .with_key(object.key);
    }
  }
}

const StoredTensor* Metadata::find_tensor(std::string_view key) const {
  return find_in(tensors, key);
}

const StoredObject* Metadata::find_object(std::string_view key) const {
  return find_in(objects, key);
}

std::span<const StoredCopy> Metadata::copies_of(uint32_t tensor, uint32_t chunk) const {
  struct ByChunk {
    using Place = std::pair<uint32_t, uint32_t>;
    static Place of(const StoredCopy& copy) { return {copy.tensor, copy.chunk}; }
    bool operator()(const StoredCopy& copy, const Place& place) const { return of(copy) < place; }
    bool operator()(const Place& place, const StoredCopy& copy) const { return place < of(copy); }
  };
  const auto [begin, end] =
      std::equal_range(copies.begin(), copies.end(), std::pair(tensor, chunk), ByChunk());
  return {begin, end};
}

const ItemLocation& Metadata::place(uint32_t tensor, uint32_t chunk, uint32_t copy) const {
  return copy == kNoCopy ? tensors[tensor].chunks[chunk].at : copies[copy].at;
}

uint64_t Metadata::tensor_bytes() const {
  uint64_t total = 0;
  for (const StoredTensor& tensor : tensors) {
    const uint64_t bytes = checked_mul(static_cast<uint64_t>(numel(tensor.shape)),
                                       itemsize(tensor.dtype), "bytes of tensor " + tensor.key);
    total = checked_add(total, bytes, "bytes of all tensors");
  }
  return total;
}

std::vector<std::string> similar_keys(const Metadata& metadata, std::string_view key,
                                      size_t limit) {
  SimilarKeys similar(key);
  for (const StoredTensor& tensor : metadata.tensors) similar.consider(tensor.key);
  for (const StoredObject& object : metadata.objects) similar.consider(object.key);
  return similar.best(limit);
}

std::string similar_keys_hint(const Metadata& metadata, std::string_view key) {
  // A key that stands for a dict is no misspelling.
  const std::string below = std::string(key) + ".";
  const auto is_below = [&](const auto& stored) { return stored.key.starts_with(below); };
  const auto tensor = std::ranges::find_if(metadata.tensors, is_below);
  if (tensor != metadata.tensors.end()) return "there are keys below it, such as " + tensor->key;
  const auto object = std::ranges::find_if(metadata.objects, is_below);
  if (object != metadata.objects.end()) return "there are keys below it, such as " + object->key;
  std::string hint;
  for (const std::string& other : similar_keys(metadata, key)) {
    hint += (hint.empty() ? "similar keys: " : ", ") + other;
  }
  return hint;
}

void expect_supported(const StoredObject& object) {
  if (object.unsupported.empty()) return;
  throw Error(ErrorCode::kUnsupported, "can't read " + object.unsupported)
      .with_key(object.key)
      .with_hint("leave this key out; all others can be read");
}

}  // namespace tilestone
