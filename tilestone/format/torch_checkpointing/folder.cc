#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/base/size_text.h"
#include "tilestone/format/archive/file_archive_internal.h"
#include "tilestone/format/archive/value_check_internal.h"
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

// The CRC-32 and the size of a record, and where in it some bytes are: their beginning, number and
// strides. Equal ones are taken for equal bytes.
using Content = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t, std::optional<Dims>>;

struct Part {
  StoredChunk chunk;
  std::optional<Content> content;         // nullopt: without a checksum, nobody knows
  std::vector<ItemLocation> copies = {};  // in the files of higher ranks
};

// The elements of `local` in `part` of its own tensor.
Part part_of(const archive::FileTensor& local, const Box& box, const Box& part, uint32_t file) {
  StoredChunk chunk = archive::chunk_of(local, part, box, file);
  const archive::FileTensor::Record& record = local.record;
  if (!record.crc32) return {std::move(chunk), std::nullopt};
  Content content{*record.crc32, record.size, chunk.at.offset - record.offset, chunk.at.length,
                  chunk.strides};
  return {std::move(chunk), std::move(content)};
}

// Whether both are known, and equal.
bool are_same(const std::optional<Content>& a, const std::optional<Content>& b) {
  return a && a == b;
}

class FolderReader {
 public:
  FolderReader(const DirectoryFiles& files, const Format& format) : files_(files), format_(format) {
    const auto index = files.contents.find(std::string(kTorchCheckpointingIndex));
    if (index == files.contents.end()) return;
    index_ = with_file(index->first, [&] { return parse_folder_index(index->second); });
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
  // A key in the files, and whose value it is: kShared, or the rank that has another one.
  using Key = std::pair<std::string, int>;
  static constexpr int kShared = -1;

  struct Merged {
    StoredTensor tensor;    // without chunks
    bool is_plain = false;  // not sharded
    std::map<Box, Part> parts = {};
  };

  uint32_t number_of(const std::string& name) {
    const auto [known, is_new] = numbers_.emplace(name, metadata_.files.size());
    if (is_new) metadata_.files.push_back(name);
    return known->second;
  }

  void find_files() {
    std::set<std::string> described;
    for (const auto& [item, known] : index_.items) {
      for (const auto& [rank, name] : known.files) {
        described.insert(name);
        if (known.serialization != kTorchSerialization) continue;
        if (files_.parts.contains(name)) {
          of_rank_[rank][item] = name;
        } else if (known.ranks.contains(rank)) {
          add_missing(item, name);
        }
      }
      if (known.serialization != kTorchSerialization) add_other(item, known);
    }
    std::map<std::string, std::set<int>> ranks;  // by item that the index does not have
    for (const auto& [name, parts] : files_.parts) {
      const auto parsed = described.contains(name) ? std::nullopt : parse_name(name);
      if (!parsed) continue;
      of_rank_[parsed->second][parsed->first] = name;
      ranks[parsed->first].insert(parsed->second);
    }
    if (!index_.items.empty()) return;
    for (const auto& [item, known] : ranks) add_gaps(item, known);
  }

  void add_other(const std::string& item, const FolderIndex::Item& known) {
    if (known.files.empty()) return;
    StoredObject& object = objects_[{item, kShared}];
    object.at.file = number_of(known.files.begin()->second);
    object.unsupported = "files of " + known.serialization.substr(0, 60) +
                         ", only those of torch.save (" + std::string(kTorchSerialization) + ")";
  }

  // An item of rank 0 is one of all ranks up to the last one.
  void add_gaps(const std::string& item, const std::set<int>& ranks) {
    constexpr int kNamed = 100;
    if (!ranks.contains(0)) return;
    for (int rank = 0, named = 0; rank < *ranks.rbegin() && named < kNamed; ++rank) {
      if (ranks.contains(rank)) continue;
      add_missing(item, item + "_" + std::to_string(rank) + std::string(kFileEnd));
      ++named;
    }
  }

  void add_missing(const std::string& item, const std::string& name) {
    number_of(name);  // verify reports it
    missing_[item].push_back(name);
  }

  void read_rank(int rank, const std::map<std::string, std::string>& names) {
    StateDict state;
    for (const auto& [item, name] : names) {
      state[item] = with_file(name, [&] { return read_rank_file(files_.parts.at(name)); });
    }
    Items items = pytorch_dialect()->to_items(state, format_);
    add_keys(metadata_.dict_keys, items.dict_keys);
    for (TensorItem& item : items.tensors) {
      const std::string& file = names.at(key_text(item.path.front()));
      with_key_and_file(item.key, file, [&] { add_tensor(item, rank, file); });
    }
    for (ObjectItem& item : items.objects) {
      add_object(item, rank, number_of(names.at(key_text(item.path.front()))));
    }
  }

  const Distribution* distribution_of(const std::string& key, int rank,
                                      const archive::FileTensor& local) const {
    const auto found = index_.tensors.find(key);
    if (found != index_.tensors.end()) {
      for (const Distribution& described : found->second) {
        const auto& ranks = described.ranks;
        if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) return &described;
      }
    }
    return static_cast<const Distribution*>(local.more.get());
  }

  void add_tensor(const TensorItem& item, int rank, const std::string& file) {
    const archive::FileTensor& local = archive::stood_for(item.pieces[0].data);
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
      parts.push_back(part_of(local, held.boxes[i], held.locals[i], number));
    }
    Key key{item.key, kShared};
    const auto known = merged_.find(key);
    bool is_own = objects_.contains(key);
    if (known != merged_.end()) {
      const StoredTensor& tensor = known->second.tensor;
      is_own = tensor.dtype != item.dtype || tensor.shape != shape;
    }
    if (is_own && !is_plain) {
      throw Error(ErrorCode::kCorrupt,
                  "ranks have saved this tensor with different shapes or dtypes");
    }
    if (known != merged_.end() && is_plain) is_own = is_own || may_differ(known->second, parts);
    if (is_own) note_own(key, rank);
    const auto [at, is_new] = merged_.try_emplace(key);
    Merged& merged = at->second;
    if (is_new) {
      merged.is_plain = is_plain;
      merged.tensor = {.key = {},
                       .path = is_own ? Path() : item.path,
                       .dtype = item.dtype,
                       .shape = shape,
                       .chunks = {}};
      merged.tensor.order = item.order;
    }
    for (const Part& part : parts) merge(item.key, merged, part);
  }

  // Whether the bytes of a tensor that each rank has as a whole are not known to be those of the
  // first rank.
  static bool may_differ(const Merged& first, const std::vector<Part>& parts) {
    if (!first.is_plain || parts.empty() || first.parts.empty()) return false;
    return !are_same(first.parts.begin()->second.content, parts[0].content);
  }

  // Makes it the key of the rank's own value.
  void note_own(Key& key, int rank) {
    key.second = rank;
    if (std::exchange(has_own_, true)) return;
    metadata_.notes.push_back(
        "ranks have saved values under one key that differ, or have no checksums, first \"" +
        key.first + "\": it is that of the lowest rank, and others have keys such as " +
        own_name(key));
  }
  static std::string own_name(const Key& key) {
    return key.first + ".__rank_" + std::to_string(key.second);
  }

  void merge(const std::string& key, Merged& merged, const Part& part) {
    const auto [at, is_first] = merged.parts.emplace(part.chunk.box, part);
    if (is_first) return;
    if (are_same(at->second.content, part.content)) {
      if (part.chunk.at.checksums) at->second.copies.push_back(part.chunk.at);
    } else if (!std::exchange(has_other_replicas_, true)) {
      metadata_.notes.push_back(
          "replicas of a shard differ, or have no checksums; that of the lowest rank counts: \"" +
          key + "\", and possibly others");
    }
  }

  void add_object(ObjectItem& item, int rank, uint32_t file) {
    std::string reason = archive::reason_in(item.value);
    auto value = std::make_shared<const Value>(std::move(item.value));
    Key key{item.key, kShared};
    const auto known = objects_.find(key);
    const bool is_known = known != objects_.end();
    if (is_known && known->second.value && *known->second.value == *value) return;
    const bool is_own = is_known || merged_.contains(key);
    if (is_own) note_own(key, rank);
    objects_[key] = {.key = {},
                     .path = is_own ? Path() : item.path,
                     .at = {.file = file, .checksums = {}},
                     .order = item.order,
                     .unsupported = std::move(reason),
                     .value = std::move(value)};
  }

  void expect_whole() {
    for (const auto& [key, described] : index_.tensors) {
      const auto item = index_.items.find(item_of(key));
      if (item == index_.items.end() || item->second.serialization != kTorchSerialization) continue;
      if (!merged_.contains({key, kShared})) fail_missing(key, "no file has this tensor");
    }
    for (const auto& [key, merged] : merged_) {
      std::vector<Box> boxes;
      for (const auto& [box, part] : merged.parts) boxes.push_back(box);
      const auto hole = find_uncovered(Box::whole(merged.tensor.shape), boxes);
      if (!hole) continue;
      const uint32_t file = boxes.empty() ? 0 : merged.parts.begin()->second.chunk.at.file;
      fail_missing(key.first, "no file has the elements " + to_string(*hole) +
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
    const size_t count = found->second.size();
    throw Error(ErrorCode::kCoverage, problem + "; " + counted(count, "file") + " of other ranks " +
                                          (count == 1 ? "is" : "are") + " missing, the first is " +
                                          found->second.front())
        .with_key(key)
        .with_file(found->second.front())
        .with_hint("copy the files of all ranks into the folder");
  }

  // A name that no file has as a key, if the value is a rank's own.
  std::string name_of(const Key& key) const {
    if (key.second == kShared) return key.first;
    Key name{own_name(key), kShared};
    while (merged_.contains(name) || objects_.contains(name)) name.first += '_';
    return name.first;
  }

  void finish() {
    std::map<std::string, Merged*> tensors;
    for (auto& [key, merged] : merged_) tensors[name_of(key)] = &merged;
    for (auto& [name, merged] : tensors) {
      const auto number = static_cast<uint32_t>(metadata_.tensors.size());
      StoredTensor& tensor = metadata_.tensors.emplace_back(std::move(merged->tensor));
      tensor.key = name;
      for (auto& [box, part] : merged->parts) {
        const auto chunk = static_cast<uint32_t>(tensor.chunks.size());
        for (const ItemLocation& at : part.copies) metadata_.copies.push_back({number, chunk, at});
        tensor.chunks.push_back(std::move(part.chunk));
      }
    }
    for (auto& [key, object] : objects_) {
      metadata_.objects.push_back(object);
      metadata_.objects.back().key = name_of(key);
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
  std::map<Key, Merged> merged_;
  std::map<Key, StoredObject> objects_;
  bool has_own_ = false;             // a rank has a value of its own
  bool has_other_replicas_ = false;  // which differ
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
