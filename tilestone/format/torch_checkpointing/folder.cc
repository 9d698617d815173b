#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/format/dialect/dialect.h"
#include "tilestone/format/torch_checkpointing/parts_internal.h"
#include "tilestone/format/torch_checkpointing/torch_checkpointing.h"
#include "tilestone/geometry/coverage.h"
#include "tilestone/state/items.h"

namespace tilestone::torch_checkpointing {
namespace {

constexpr std::string_view kFileEnd = ".pt";

// Item and rank of a file that is named as the package names it: "model_0.pt".
std::optional<std::pair<std::string, int>> parse_name(std::string_view name) {
  if (!name.ends_with(kFileEnd)) return std::nullopt;
  name.remove_suffix(kFileEnd.size());
  const size_t line = name.rfind('_');
  if (line == std::string_view::npos) return std::nullopt;
  const std::string_view item = name.substr(0, line), digits = name.substr(line + 1);
  const bool is_number =
      !digits.empty() && digits.size() <= 8 && (digits.size() == 1 || digits[0] != '0') &&
      std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number || !is_torch_checkpointing_item(item)) return std::nullopt;
  return std::pair(std::string(item), std::stoi(std::string(digits)));
}

// A chunk of the elements of `local` in `part` of its own tensor.
StoredChunk chunk_of(const LocalTensor& local, const Box& box, const Box& part, uint32_t file) {
  uint64_t begin = 0, last = 0;  // elements
  for (size_t d = 0; d < part.rank(); ++d) {
    const auto stride = static_cast<uint64_t>(local.strides[d]);
    begin += static_cast<uint64_t>(part.offset[d]) * stride;
    last += static_cast<uint64_t>(part.shape[d] - 1) * stride;
  }
  const uint64_t size = itemsize(local.dtype);
  StoredChunk chunk{.box = box, .at = {}};
  chunk.at = {.file = file,
              .codec = Codec::kNone,
              .offset = local.offset + begin * size,
              .length = (last + 1) * size,
              .checksums = {}};
  for (size_t d = 0; d < part.rank(); ++d) {
    if (part.shape[d] > 1 && local.strides[d] != contiguous_strides(part.shape)[d]) {
      chunk.strides = local.strides;
    }
  }
  const bool is_record =
      chunk.at.offset == local.record_offset && chunk.at.length == local.record_size;
  if (!chunk.strides && is_record && local.record_crc32) {
    chunk.at.checksums = ItemChecksums{0, *local.record_crc32, *local.record_crc32};
  }
  return chunk;
}

// Where bytes are in a record, and the record's checksum: equal ones are taken for equal bytes.
struct Content {
  uint32_t record_crc32;
  uint64_t record_size;
  uint64_t begin;  // in the record
  uint64_t length;
  std::optional<Dims> strides;
  friend bool operator==(const Content&, const Content&) = default;
};

struct Part {
  StoredChunk chunk;
  std::optional<Content> content;  // nullopt: without a checksum, nobody knows
};

Part part_of(const LocalTensor& local, StoredChunk chunk) {
  std::optional<Content> content;
  if (local.record_crc32) {
    content = Content{*local.record_crc32, local.record_size, chunk.at.offset - local.record_offset,
                      chunk.at.length, chunk.strides};
  }
  return {std::move(chunk), std::move(content)};
}

// Whether both are known, and equal.
bool are_same(const std::optional<Content>& a, const std::optional<Content>& b) {
  return a && b && *a == *b;
}

class FolderReader {
 public:
  FolderReader(const DirectoryFiles& files, const Format& format) : files_(files), format_(format) {
    const auto index = files.contents.find(std::string(kTorchCheckpointingIndex));
    if (index == files.contents.end()) return;
    try {
      index_ = parse_folder_index(index->second);
    } catch (Error& error) {
      error.with_file(std::string(kTorchCheckpointingIndex));
      throw;
    }
  }

  Metadata run() {
    metadata_.writer = "torch_checkpointing";
    find_files();
    for (const auto& [rank, items] : of_rank_) read_rank(rank, items);
    expect_whole();
    finish();
    return std::move(metadata_);
  }

 private:
  struct Merged {
    StoredTensor tensor;
    bool is_plain = false;                              // not sharded
    std::map<Box, uint32_t> chunks = {};                // by box
    std::vector<std::optional<Content>> contents = {};  // of the chunks
    std::vector<std::pair<uint32_t, ItemLocation>> copies = {};
  };

  uint32_t number_of(const std::string& name) {
    const auto [known, is_new] = numbers_.emplace(name, metadata_.files.size());
    if (is_new) metadata_.files.push_back(name);
    return known->second;
  }

  void find_files() {
    std::set<std::string> described;
    for (const auto& [item, known] : index_.items) {
      for (const auto& [rank, name] : known.files) described.insert(name);
      if (known.serialization != kTorchSerialization) {
        add_other(item, known);
        continue;
      }
      for (const auto& [rank, name] : known.files) {
        if (files_.parts.contains(name)) {
          of_rank_[rank][item] = name;
        } else if (known.ranks.contains(rank)) {
          add_missing(item, name);
        }
      }
    }
    std::map<std::string, std::set<int>> ranks;  // by item that the index does not have
    for (const auto& [name, parts] : files_.parts) {
      const auto parsed = described.contains(name) ? std::nullopt : parse_name(name);
      if (!parsed) continue;
      of_rank_[parsed->second][parsed->first] = name;
      ranks[parsed->first].insert(parsed->second);
    }
    if (index_.items.empty()) {
      for (const auto& [item, known] : ranks) expect_no_gaps(item, known);
    }
  }

  void add_other(const std::string& item, const FolderIndex::Item& known) {
    if (known.files.empty()) return;
    StoredObject object{.key = item, .path = {}, .at = {}};
    object.at.file = number_of(known.files.begin()->second);
    object.unsupported = "files of " + known.serialization.substr(0, 60) +
                         ", only those of torch.save (" + std::string(kTorchSerialization) + ")";
    metadata_.objects.push_back(std::move(object));
  }

  // An item of rank 0 is one of all ranks up to the last one.
  void expect_no_gaps(const std::string& item, const std::set<int>& ranks) {
    constexpr size_t kNamed = 100;
    if (!ranks.contains(0)) return;
    for (int rank = 0; rank < *ranks.rbegin() && missing_[item].size() < kNamed; ++rank) {
      if (ranks.contains(rank)) continue;
      add_missing(item, item + "_" + std::to_string(rank) + std::string(kFileEnd));
    }
    if (missing_[item].empty()) missing_.erase(item);
  }

  void add_missing(const std::string& item, const std::string& name) {
    number_of(name);  // verify reports it
    missing_[item].push_back(name);
  }

  void read_rank(int rank, const std::map<std::string, std::string>& names) {
    StateDict state;
    for (const auto& [item, name] : names) {
      try {
        state[item] = read_rank_file(files_.parts.at(name));
      } catch (Error& error) {
        error.with_file(name);
        throw;
      }
    }
    Items items = pytorch_dialect()->to_items(state, format_);
    add_keys(metadata_.dict_keys, items.dict_keys);
    for (TensorItem& item : items.tensors) {
      const std::string& file = names.at(key_text(item.path.front()));
      try {
        add_tensor(item, rank, file);
      } catch (Error& error) {
        error.with_key(item.key).with_file(file);
        throw;
      }
    }
    for (ObjectItem& item : items.objects) {
      add_object(item, rank, number_of(names.at(key_text(item.path.front()))));
    }
  }

  const Distribution* distribution_of(const std::string& key, int rank,
                                      const LocalTensor& local) const {
    const auto found = index_.tensors.find(key);
    if (found != index_.tensors.end()) {
      for (const Distribution& described : found->second) {
        const auto& ranks = described.ranks;
        if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) return &described;
      }
    }
    return local.distribution ? &*local.distribution : nullptr;
  }

  void add_tensor(const TensorItem& item, int rank, const std::string& file) {
    const LocalTensor& local = local_of(item.pieces[0].data);
    const Distribution* const described = distribution_of(item.key, rank, local);
    const Dims& shape = described != nullptr ? described->shape : local.shape;
    const Box whole = Box::whole(shape);
    const LocalBoxes held = described != nullptr ? held_by(*described, rank, local.shape)
                                                 : LocalBoxes{shape, {whole}, {whole}};
    const bool is_plain = held.boxes.size() == 1 && held.boxes[0] == whole;
    const uint32_t number = number_of(file);
    std::vector<Part> parts;
    for (size_t i = 0; i < held.boxes.size(); ++i) {
      if (held.boxes[i].empty()) continue;
      parts.push_back(part_of(local, chunk_of(local, held.boxes[i], held.locals[i], number)));
    }
    if (const auto known = merged_.find(item.key); known != merged_.end()) {
      const StoredTensor& tensor = known->second.tensor;
      const bool fits = tensor.dtype == item.dtype && tensor.shape == shape;
      if (!fits && !is_plain) {
        throw Error(ErrorCode::kCorrupt,
                    "ranks have saved this tensor with different shapes or dtypes");
      }
      if (!fits || (is_plain && may_differ(known->second, parts))) {
        return merge(item, of_rank(item.key, rank), {}, shape, parts, is_plain);
      }
    }
    merge(item, item.key, item.path, shape, parts, is_plain);
  }

  // Whether the bytes of a tensor that each rank has as a whole are not known to be those of the
  // first rank.
  static bool may_differ(const Merged& first, const std::vector<Part>& parts) {
    if (!first.is_plain || parts.empty() || first.contents.empty()) return false;
    return !are_same(first.contents[0], parts[0].content);
  }

  std::string of_rank(const std::string& key, int rank) {
    if (rank_keys_++ == 0) {
      metadata_.notes.push_back(
          "ranks have saved values under one key that differ, or have no checksums, first \"" +
          key + "\": it is that of the lowest rank, and others have keys such as " + key +
          ".__rank_" + std::to_string(rank));
    }
    return key + ".__rank_" + std::to_string(rank);
  }

  void merge(const TensorItem& item, const std::string& key, const Path& path, const Dims& shape,
             const std::vector<Part>& parts, bool is_plain) {
    const auto [known, is_new] = merged_.try_emplace(key);
    Merged& merged = known->second;
    if (is_new) {
      merged.tensor = {.key = key, .path = path, .dtype = item.dtype, .shape = shape, .chunks = {}};
      merged.tensor.order = item.order;
      merged.is_plain = is_plain;
    }
    for (const auto& [chunk, content] : parts) {
      const auto [at, is_first] =
          merged.chunks.emplace(chunk.box, static_cast<uint32_t>(merged.tensor.chunks.size()));
      if (is_first) {
        merged.tensor.chunks.push_back(chunk);
        merged.contents.push_back(content);
      } else if (are_same(merged.contents[at->second], content)) {
        if (chunk.at.checksums) merged.copies.emplace_back(at->second, chunk.at);
      } else if (other_replicas_++ == 0) {
        metadata_.notes.push_back(
            "replicas of a shard differ, or have no checksums; that of the lowest rank counts: \"" +
            key + "\", and possibly others");
      }
    }
  }

  void add_object(ObjectItem& item, int rank, uint32_t file) {
    const std::string reason = unreadable(item.value);
    auto value = std::make_shared<const Value>(std::move(item.value));
    const auto [known, is_new] = objects_.try_emplace(item.key);
    StoredObject* object = &known->second;
    if (!is_new) {
      if (*object->value == *value) return;
      object = &objects_[of_rank(item.key, rank)];
    }
    object->path = is_new ? item.path : Path();
    object->order = item.order;
    object->value = std::move(value);
    object->unsupported = reason;
    object->at.file = file;
  }

  void expect_whole() {
    for (const auto& [key, described] : index_.tensors) {
      const auto item = index_.items.find(item_of(key));
      if (item == index_.items.end() || item->second.serialization != kTorchSerialization) continue;
      if (!merged_.contains(key)) fail_missing(key, "no file has this tensor");
    }
    for (const auto& [key, merged] : merged_) {
      std::vector<Box> boxes;
      for (const StoredChunk& chunk : merged.tensor.chunks) boxes.push_back(chunk.box);
      const auto hole = find_uncovered(Box::whole(merged.tensor.shape), boxes);
      if (!hole) continue;
      const uint32_t file = merged.tensor.chunks.empty() ? 0 : merged.tensor.chunks[0].at.file;
      fail_missing(key, "no file has the elements " + to_string(*hole) +
                            " of this tensor; others are in " + metadata_.files[file]);
    }
    for (const auto& [item, names] : missing_) {
      metadata_.notes.push_back(names.front() + (names.size() == 1 ? " is" : " and others are") +
                                " missing; the tensors of \"" + item +
                                "\" are read from the files of other ranks");
    }
  }

  static std::string item_of(const std::string& key) { return key.substr(0, key.find('.')); }

  [[noreturn]] void fail_missing(const std::string& key, const std::string& problem) const {
    const auto found = missing_.find(item_of(key));
    if (found == missing_.end()) {
      throw Error(ErrorCode::kCoverage, problem)
          .with_key(key)
          .with_hint("the files of the highest ranks may be missing");
    }
    const std::vector<std::string>& names = found->second;
    throw Error(ErrorCode::kCoverage,
                problem + "; " + counted(names.size(), "file") + " of other ranks " +
                    (names.size() == 1 ? "is" : "are") + " missing: " + names.front() +
                    (names.size() == 1 ? "" : ", " + names[1]) + (names.size() > 2 ? ", ..." : ""))
        .with_key(key)
        .with_file(names.front())
        .with_hint("copy the files of all ranks into the folder");
  }

  void finish() {
    for (auto& [key, merged] : merged_) {
      const auto tensor = static_cast<uint32_t>(metadata_.tensors.size());
      for (auto& [chunk, at] : merged.copies) metadata_.copies.push_back({tensor, chunk, at});
      metadata_.tensors.push_back(std::move(merged.tensor));
    }
    std::sort(metadata_.copies.begin(), metadata_.copies.end(),
              [](const StoredCopy& a, const StoredCopy& b) {
                return std::tuple(a.tensor, a.chunk, a.at.file) <
                       std::tuple(b.tensor, b.chunk, b.at.file);
              });
    for (auto& [key, object] : objects_) {
      object.key = key;
      metadata_.objects.push_back(std::move(object));
    }
    metadata_.index();
  }

  const DirectoryFiles& files_;
  const Format& format_;
  FolderIndex index_;
  Metadata metadata_;
  std::map<std::string, uint32_t> numbers_;                    // of files
  std::map<int, std::map<std::string, std::string>> of_rank_;  // rank -> item -> file
  std::map<std::string, std::vector<std::string>> missing_;    // item -> files
  std::map<std::string, Merged> merged_;                       // by key
  std::map<std::string, StoredObject> objects_;                // by key
  uint64_t rank_keys_ = 0;
  uint64_t other_replicas_ = 0;
};

}  // namespace

std::vector<std::string> rank_files(std::span<const std::string> names) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name.ends_with(kFileEnd)) found.push_back(name);
  }
  return found;
}

bool are_all_rank_files(std::span<const std::string> names) {
  const auto rank_of = [](const std::string& name) {
    const auto parsed = parse_name(name);
    return parsed ? parsed->second : -1;
  };
  return std::all_of(names.begin(), names.end(),
                     [&](const std::string& name) { return rank_of(name) >= 0; }) &&
         std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return rank_of(name) == 0; });
}

Metadata read_folder(const DirectoryFiles& files, const Format& format) {
  return FolderReader(files, format).run();
}

}  // namespace tilestone::torch_checkpointing
