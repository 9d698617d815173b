#include "tilestone/engine/open/tp_replicas_internal.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace tilestone::engine {
namespace {

constexpr std::string_view kMiddle = ".__tp_replica_";
constexpr size_t kMaxDigits = 9;

struct SecondName {
  std::string_view key;  // the plain one
  uint32_t rank = 0;
};

std::optional<SecondName> parse(std::string_view name) {
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

// For each chunk of `second` the chunk of `first` that has its elements; nullopt where the two are
// not the same tensor.
std::optional<std::vector<uint32_t>> same_chunks(const StoredTensor& first,
                                                 const StoredTensor& second) {
  if (first.dtype != second.dtype || first.shape != second.shape) return std::nullopt;
  if (first.chunks.size() != second.chunks.size()) return std::nullopt;
  const ChunksByBox chunks(first);
  std::vector<uint32_t> found;
  for (const StoredChunk& chunk : second.chunks) {
    const auto place = chunks.find(chunk.box);
    if (!place || chunk.flat || first.chunks[*place].flat) return std::nullopt;
    const auto& a = first.chunks[*place].at.checksums;
    const auto& b = chunk.at.checksums;
    if (a && b && a->payload_crc32 != b->payload_crc32) return std::nullopt;
    found.push_back(*place);
  }
  return found;
}

// Replaces the tensors of a checkpoint by those of plain names.
class Uniter {
 public:
  explicit Uniter(Metadata& metadata) : metadata_(metadata) {}

  void run() {
    find();
    if (names_.empty()) return;
    for (auto& [key, seconds] : names_) unite(key, seconds);
    rebuild();
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
    }
    if (plain == nullptr) plain_.emplace(first, key);
    std::move(copies.begin(), copies.end(), std::back_inserter(copies_));
  }

  // The tensors change their places: copies are found again by key.
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
    uint32_t place = 0;
    std::erase_if(metadata_.tensors, [&](const StoredTensor&) { return gone_.contains(place++); });
    metadata_.index();
    metadata_.copies.clear();
    for (size_t i = 0; i < copies_.size(); ++i) {
      const auto t = metadata_.find_tensor(keys[i]) - metadata_.tensors.data();
      metadata_.copies.push_back({static_cast<uint32_t>(t), copies_[i].chunk, copies_[i].at});
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
  std::map<std::string, std::map<uint32_t, uint32_t>> names_;  // tensors by plain key and rank
  std::map<uint32_t, uint32_t> gone_;      // tensors, and the one that each is a copy of
  std::map<uint32_t, std::string> plain_;  // keys of tensors that get a plain one
  std::vector<Copy> copies_;
};

class Renamer {
 public:
  Renamer(const Metadata& stored, std::set<std::string>& renamed)
      : stored_(stored), renamed_(renamed) {}

  void visit(StateDict& dict) {
    for (auto& [element, node] : dict) visit(node);
  }

 private:
  void visit(StateNode& node) {
    if (auto* dict = node.get_if<StateDict>()) {
      visit(*dict);
    } else if (auto* list = node.get_if<StateList>()) {
      for (StateNode& child : *list) visit(child);
    } else if (auto* tensor = node.get_if<ShardedTensor>()) {
      rename(*tensor);
    }
  }

  void rename(ShardedTensor& tensor) {
    const auto second = parse(tensor.key);
    if (!second || stored_.find_tensor(tensor.key) != nullptr) return;
    renamed_.insert(tensor.key);
    if (second->rank > 0 && is_main_replica(tensor.replica_id)) {
      tensor.replica_id = {static_cast<int64_t>(second->rank)};
    }
    tensor.key = std::string(second->key);  // it lies in the old one
  }

  const Metadata& stored_;
  std::set<std::string>& renamed_;
};

}  // namespace

std::string_view key_of_replica(std::string_view key) {
  const auto second = parse(key);
  return second ? second->key : std::string_view();
}

void unite_tp_replicas(Metadata& metadata) { Uniter(metadata).run(); }

void ask_for_plain_keys(StateDict& wanted, const Metadata& stored, std::set<std::string>& renamed) {
  Renamer(stored, renamed).visit(wanted);
}

}  // namespace tilestone::engine
