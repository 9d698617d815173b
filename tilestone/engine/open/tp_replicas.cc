#include "tilestone/engine/open/tp_replicas_internal.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/state/node_walk.h"

namespace tilestone::engine {
namespace {

constexpr std::string_view kMiddle = ".__tp_replica_";
constexpr size_t kMaxDigits = 9;

struct SecondName {
  std::string_view key;  // the plain one
  uint32_t rank = 0;
};

std::optional<SecondName> parse_any(std::string_view name) {
  const size_t at = name.rfind(kMiddle);
  if (at == std::string_view::npos || at == 0) return std::nullopt;
  const std::string_view digits = name.substr(at + kMiddle.size());
  if (digits.empty() || digits.size() > kMaxDigits) return std::nullopt;
  uint32_t rank = 0;
  for (const char digit : digits) {
    if (digit < '0' || digit > '9') return std::nullopt;
    rank = 10 * rank + static_cast<uint32_t>(digit - '0');
  }
  return SecondName{name.substr(0, at), rank};
}

// A second name of a second name is treated like any other key.
std::optional<SecondName> parse(std::string_view name) {
  const auto second = parse_any(name);
  return second && !parse_any(second->key) ? second : std::nullopt;
}

// For each chunk of `second`, the number of the chunk of `first` with the same elements. nullopt if
// the tensors differ.
std::optional<std::vector<uint32_t>> same_chunks(const StoredTensor& first,
                                                 const StoredTensor& second) {
  if (first.dtype != second.dtype || first.shape != second.shape) return std::nullopt;
  if (first.chunks.size() != second.chunks.size()) return std::nullopt;
  const ChunksByBox chunks(first);
  std::vector<uint32_t> found;
  for (const StoredChunk& chunk : second.chunks) {
    const auto same = chunks.find(chunk.box);
    if (!same || chunk.flat || first.chunks[*same].flat) return std::nullopt;
    const auto& a = first.chunks[*same].at.checksums;
    const auto& b = chunk.at.checksums;
    if (a && b && a->payload_crc32 != b->payload_crc32) return std::nullopt;
    found.push_back(*same);
  }
  return found;
}

// Unites a checkpoint's tensors with second names under their plain names.
class Uniter {
 public:
  explicit Uniter(Metadata& metadata) : metadata_(metadata) {}

  ReplicaPlaces run() {
    find();
    for (auto& [key, seconds] : names_) unite(key, seconds);
    if (!names_.empty()) rebuild();
    return std::move(places_);
  }

 private:
  struct Copy {
    uint32_t tensor = 0, chunk = 0;
    ItemLocation at;
  };

  void find() {
    for (uint32_t t = 0; t < metadata_.tensors.size(); ++t) {
      const auto second = parse(metadata_.tensors[t].key);
      if (second) names_[std::string(second->key)].emplace(second->rank, t);
    }
  }

  void unite(const std::string& key, const std::map<uint32_t, uint32_t>& seconds) {
    if (metadata_.find_object(key) != nullptr) return;
    const StoredTensor* plain = metadata_.find_tensor(key);
    const uint32_t first = plain != nullptr
                               ? static_cast<uint32_t>(plain - metadata_.tensors.data())
                               : seconds.begin()->second;
    std::vector<Copy> copies;
    for (const auto& [rank, t] : seconds) {
      if (t == first) continue;
      const StoredTensor& second = metadata_.tensors[t];
      const auto chunks = same_chunks(metadata_.tensors[first], second);
      if (!chunks) return;
      for (size_t c = 0; c < chunks->size(); ++c) {
        copies.push_back({first, (*chunks)[c], second.chunks[c].at});
      }
    }
    for (const auto& [rank, t] : seconds) {
      if (t != first) gone_[t] = first;
      auto& places = places_[{key, rank}];
      for (const StoredChunk& chunk : metadata_.tensors[t].chunks) {
        places.emplace(chunk.box, chunk.at);
      }
    }
    if (plain == nullptr) plain_.emplace(first, key);
    std::move(copies.begin(), copies.end(), std::back_inserter(copies_));
  }

  // Tensors get new numbers, so copies find their tensors again by key.
  void rebuild() {
    for (const StoredCopy& copy : metadata_.copies) {
      const auto gone = gone_.find(copy.tensor);
      if (gone == gone_.end()) {
        copies_.push_back({copy.tensor, copy.chunk, copy.at});
        continue;
      }
      const StoredTensor& first = metadata_.tensors[gone->second];
      const Box& box = metadata_.tensors[copy.tensor].chunks[copy.chunk].box;
      copies_.push_back({gone->second, *ChunksByBox(first).find(box), copy.at});
    }
    for (const auto& [t, key] : plain_) rename(metadata_.tensors[t], key);
    std::vector<std::string> keys;
    for (const Copy& copy : copies_) keys.push_back(metadata_.tensors[copy.tensor].key);
    uint32_t number = 0;
    std::erase_if(metadata_.tensors, [&](const StoredTensor&) { return gone_.contains(number++); });
    metadata_.index();
    metadata_.copies.clear();
    for (size_t i = 0; i < copies_.size(); ++i) {
      const StoredTensor* const found = metadata_.find_tensor(keys[i]);
      if (found == nullptr) {
        throw Error(ErrorCode::kCorrupt,
                    "the index names replicas of a tensor that it does not contain")
            .with_key(keys[i]);
      }
      const auto t = static_cast<uint32_t>(found - metadata_.tensors.data());
      metadata_.copies.push_back({t, copies_[i].chunk, copies_[i].at});
    }
    std::stable_sort(metadata_.copies.begin(), metadata_.copies.end(),
                     [](const StoredCopy& a, const StoredCopy& b) {
                       return std::pair(a.tensor, a.chunk) < std::pair(b.tensor, b.chunk);
                     });
  }

  void rename(StoredTensor& tensor, const std::string& key) {
    auto attributes = metadata_.attributes.extract(tensor.key);
    if (!attributes.empty()) {
      attributes.key() = key;
      metadata_.attributes.insert(std::move(attributes));
    }
    tensor.key = key;
  }

  Metadata& metadata_;
  std::map<std::string, std::map<uint32_t, uint32_t>> names_;  // plain key -> rank -> tensor
  std::map<uint32_t, uint32_t> gone_;      // removed tensor -> the tensor that it is a copy of
  std::map<uint32_t, std::string> plain_;  // tensor to be renamed -> its plain key
  std::vector<Copy> copies_;
  ReplicaPlaces places_;
};

// Whether two tensors of an index refer to the same bytes.
bool have_same_bytes(const StoredTensor& a, const StoredTensor& b) {
  if (a.dtype != b.dtype || a.shape != b.shape || a.chunks.size() != b.chunks.size()) return false;
  const ChunksByBox chunks(a);
  return std::all_of(b.chunks.begin(), b.chunks.end(), [&](const StoredChunk& chunk) {
    const auto found = chunks.find(chunk.box);
    if (!found) return false;
    const ItemLocation& at = a.chunks[*found].at;
    return at.file == chunk.at.file && at.offset == chunk.at.offset &&
           at.length == chunk.at.length && at.codec == chunk.at.codec;
  });
}

std::string second_name(const std::string& key, uint32_t rank) {
  return key + std::string(kMiddle) + std::to_string(rank);
}

class Renamer {
 public:
  explicit Renamer(const Metadata& stored) : stored_(stored) {}

  std::set<std::string> run(StateDict& wanted) {
    for_each_node(wanted, [this](StateNode& node, const Path&) {
      if (auto* tensor = node.get_if<ShardedTensor>()) rename(*tensor);
    });
    return std::move(renamed_);
  }

 private:
  void rename(ShardedTensor& tensor) {
    const auto second = parse(tensor.key);
    if (!second || stored_.find_tensor(tensor.key) != nullptr) return;
    renamed_.insert(tensor.key);
    if (second->rank > 0 && is_main_replica(tensor.replica_id)) {
      tensor.replica_id = {static_cast<int64_t>(second->rank)};
    }
    tensor.key = stored_key(std::string(second->key));  // a copy, since it points into tensor.key
  }

  // The plain key if the checkpoint has it, else the lowest rank's: replicas that differ keep their
  // second names.
  std::string stored_key(std::string plain) const {
    if (stored_.find_tensor(plain) != nullptr) return plain;
    for (uint32_t rank = 0; rank < kMaxReplicas; ++rank) {
      std::string name = second_name(plain, rank);
      if (stored_.find_tensor(name) != nullptr) return name;
      if (rank == 0 && !any_begins_with(plain + std::string(kMiddle))) break;
    }
    return plain;
  }

  bool any_begins_with(const std::string& prefix) const {
    const auto found = std::lower_bound(
        stored_.tensors.begin(), stored_.tensors.end(), prefix,
        [](const StoredTensor& tensor, const std::string& text) { return tensor.key < text; });
    return found != stored_.tensors.end() && found->key.starts_with(prefix);
  }

  const Metadata& stored_;
  std::set<std::string> renamed_;  // old names
};

}  // namespace

std::string_view key_of_replica(std::string_view key) {
  const auto second = parse(key);
  return second ? second->key : std::string_view();
}

uint32_t rank_of_replica(std::string_view key) {
  const auto second = parse(key);
  return second ? second->rank : 0;
}

ReplicaNames replicas_among(const Items& items) {
  constexpr size_t kNumbers = 3;  // a replica id has a pipeline, a tensor and a data parallel rank
  ReplicaNames found;
  for (const TensorItem& item : items.tensors) {
    if (item.replica_id.size() != kNumbers || item.replica_id[1] == 0) continue;
    const int64_t rank = item.replica_id[1];
    if (rank < 0 || rank >= static_cast<int64_t>(kMaxReplicas)) {
      throw Error(ErrorCode::kInvalidArgument, "the tensor-parallel rank " + std::to_string(rank) +
                                                   " of a replica id is not one of 0 to " +
                                                   std::to_string(kMaxReplicas - 1))
          .with_key(item.key);
    }
    merge_replica_names(found, {{item.key, static_cast<uint32_t>(rank)}});
  }
  return found;
}

void merge_replica_names(ReplicaNames& names, const ReplicaNames& others) {
  for (const auto& [key, rank] : others) {
    uint32_t& highest = names[key];
    highest = std::max(highest, rank);
  }
}

void add_replica_names(Metadata& metadata, const ReplicaNames& names) {
  if (names.empty()) return;
  std::vector<StoredTensor> added;
  for (const auto& [key, highest] : names) {
    const StoredTensor* tensor = metadata.find_tensor(key);
    if (tensor == nullptr) continue;
    for (uint32_t rank = 0; rank <= highest; ++rank) {
      StoredTensor second = *tensor;
      second.key = second_name(key, rank);
      second.path = {};
      if (metadata.find_tensor(second.key) != nullptr ||
          metadata.find_object(second.key) != nullptr) {
        throw Error(ErrorCode::kInvalidArgument,
                    "a key is also the name of a replica of " + key + " (tp_replica_names)")
            .with_key(second.key);
      }
      added.push_back(std::move(second));
    }
  }
  metadata.copies.clear();
  std::move(added.begin(), added.end(), std::back_inserter(metadata.tensors));
  metadata.index();
}

ReplicaNames take_replica_names(Metadata& metadata) {
  ReplicaNames names;
  std::set<std::string> taken;
  for (const StoredTensor& tensor : metadata.tensors) {
    const auto second = parse(tensor.key);
    if (!second) continue;
    const StoredTensor* plain = metadata.find_tensor(second->key);
    if (plain == nullptr || !have_same_bytes(*plain, tensor)) continue;
    merge_replica_names(names, {{plain->key, second->rank}});
    taken.insert(tensor.key);
  }
  if (taken.empty()) return names;
  std::erase_if(metadata.tensors,
                [&](const StoredTensor& tensor) { return taken.contains(tensor.key); });
  return names;
}

ReplicaPlaces unite_tp_replicas(Metadata& metadata) { return Uniter(metadata).run(); }

std::set<std::string> ask_for_plain_keys(StateDict& wanted, const Metadata& stored) {
  return Renamer(stored).run(wanted);
}

}  // namespace tilestone::engine
