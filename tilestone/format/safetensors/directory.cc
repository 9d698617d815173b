#include "tilestone/format/safetensors/directory_internal.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/safetensors/weight_map_internal.h"

namespace tilestone::safetensors {
namespace {

bool is_top_level(std::string_view name) { return name.find('/') == std::string_view::npos; }

// The only index, or Hugging Face's among several; "": there is none.
std::string index_of(const std::vector<std::string>& indexes) {
  if (indexes.empty()) return "";
  if (indexes.size() == 1) return indexes.front();
  if (std::find(indexes.begin(), indexes.end(), kIndexName) != indexes.end()) {
    return std::string(kIndexName);
  }
  throw Error(ErrorCode::kUnsupported,
              "the folder has several indexes of safetensors files, among "
              "them " +
                  indexes[0] + " and " + indexes[1])
      .with_file(indexes[0])
      .with_hint("open a folder that has one of them and its files, or one of the files");
}

class FolderReader {
 public:
  explicit FolderReader(const DirectoryFiles& files) : files_(files) {}

  Metadata run() {
    metadata_.writer = "safetensors";
    const std::string index = index_of(index_files_among(files_.names));
    if (index.empty()) {
      read_files(data_files(files_.names), nullptr, "");
    } else {
      read_indexed(index);
    }
    metadata_.index();
    return std::move(metadata_);
  }

 private:
  void read_indexed(const std::string& index) {
    const WeightMap map = parse_weight_map(files_.contents.at(index), index);
    std::set<std::string> named;
    for (const auto& [key, name] : map) named.insert(name);
    // transformers, too, takes this file if it exists, whatever the index says.
    if (files_.parts.contains(std::string(kOnlyFile)) && !named.contains(std::string(kOnlyFile))) {
      note(std::string(kOnlyFile) + " counts, not the index " + index + ", which does not name it");
      return read_files({std::string(kOnlyFile)}, nullptr, "");
    }
    metadata_.writer = "safetensors (Hugging Face)";
    read_files({named.begin(), named.end()}, &map, index);
    for (const auto& [name, parts] : files_.parts) {
      if (!named.contains(name)) {
        note(name + " is not in the index " + index + ": its tensors are not read");
      }
    }
    if (map.empty()) expect_no_tensors(index);
    for (const auto& [key, name] : map) {
      const auto found = file_of_.find(key);
      if (found != file_of_.end() && found->second == name) continue;
      throw Error(ErrorCode::kCorrupt,
                  "the index " + index + " says that this file has the tensor, but it has not")
          .with_key(key)
          .with_file(name);
    }
  }

  // Beside an index without tensors.
  void expect_no_tensors(const std::string& index) {
    read_files(data_files(files_.names), nullptr, "");
    if (file_of_.empty()) return;
    throw Error(ErrorCode::kCorrupt, "the index names no tensor, but the file " +
                                         file_of_.begin()->second + " beside it has some")
        .with_key(file_of_.begin()->first)
        .with_file(index)
        .with_hint("write the index again, or remove it to open all files of the folder");
  }

  void note(std::string text) { metadata_.notes.push_back(std::move(text)); }

  // `map`: says which file counts if several have the same key.
  void read_files(const std::vector<std::string>& names, const WeightMap* map,
                  const std::string& index) {
    for (const std::string& name : names) {
      const auto found = files_.parts.find(name);
      if (found == files_.parts.end()) {
        throw Error(ErrorCode::kCorrupt,
                    "the file is missing, but the index " + index + " names it")
            .with_file(name);
      }
      read_file(name, found->second, map);
    }
  }

  void read_file(const std::string& name, const FileParts& read, const WeightMap* map) {
    const auto length = read.parts.find(0);
    const auto text = read.parts.find(kLengthBytes);
    if (length == read.parts.end()) {
      throw Error(ErrorCode::kInternal, "a header has not been read").with_file(name);
    }
    const uint64_t size = header_length(length->second, read.size, name);
    if (size > 0 && (text == read.parts.end() || text->second.size() != size)) {
      throw Error(ErrorCode::kInternal, "a header has not been read").with_file(name);
    }
    const ByteView json = size > 0 ? ByteView(text->second) : ByteView();
    const auto file = static_cast<uint32_t>(metadata_.files.size());
    metadata_.files.push_back(name);
    std::vector<std::string> others;  // keys that the index gives to other files
    bool has_places = false;
    for (HeaderTensor& tensor : parse_header(json, read.size, name)) {
      if (map != nullptr) {
        const auto wanted = map->find(tensor.key);
        if (wanted != map->end() && wanted->second != name) {
          others.push_back(tensor.key);
          continue;
        }
      }
      const auto [known, is_new] = file_of_.emplace(tensor.key, name);
      has_places = has_places || tensor.saved_at;
      if (tensor.saved_at && (!is_new || *tensor.saved_at != Dims(tensor.saved_at->size(), 0))) {
        refuse_piece(tensor, name);
      }
      if (!is_new) refuse_second(tensor.key, known->second, name);
      add(std::move(tensor), file, kLengthBytes + size);
    }
    if (!others.empty()) {
      note(name + " also has " + std::to_string(others.size()) +
           (others.size() == 1 ? " key that" : " keys that") +
           " the index reads from other files: " + in_quotes(others.front()) +
           (others.size() == 1 ? "" : " and others"));
    }
    if (has_places && is_shard_name(name) && files_.parts.size() == 1) {
      note(name +
           " is one rank's file: if other ranks have saved too, its tensors are only pieces, which "
           "it does not say");
    }
  }

  void add(HeaderTensor tensor, uint32_t file, uint64_t data) {
    const ItemLocation at{.file = file,
                          .codec = Codec::kNone,
                          .offset = data + tensor.begin,
                          .length = tensor.end - tensor.begin,
                          .checksums = {}};
    if (!tensor.unsupported.empty()) {
      metadata_.objects.push_back({.key = std::move(tensor.key),
                                   .path = {},
                                   .at = at,
                                   .unsupported = "a tensor of " + tensor.unsupported});
      return;
    }
    StoredTensor stored{.key = std::move(tensor.key),
                        .path = {},
                        .dtype = tensor.dtype,
                        .shape = tensor.shape,
                        .chunks = {}};
    if (at.length > 0) stored.chunks.push_back({Box::whole(stored.shape), at});
    metadata_.tensors.push_back(std::move(stored));
  }

  [[noreturn]] static void refuse_piece(const HeaderTensor& tensor, const std::string& file) {
    throw Error(ErrorCode::kUnsupported,
                "this is a piece of a tensor, at " + to_string(*tensor.saved_at) +
                    ", whose other pieces are in the files of other ranks: it was saved by "
                    "PyTorch's HuggingFaceStorageWriter(save_distributed=True)")
        .with_key(tensor.key)
        .with_file(file)
        .with_hint(
            "join the files of all ranks first, with consolidate_safetensors_files of "
            "torch.distributed.checkpoint._consolidate_hf_safetensors, or save with "
            "enable_consolidation=True");
  }

  [[noreturn]] static void refuse_second(const std::string& key, const std::string& first,
                                         const std::string& second) {
    throw Error(ErrorCode::kUnsupported, "the safetensors files " + first + " and " + second +
                                             " both have this tensor, and no index says which one "
                                             "counts")
        .with_key(key)
        .with_file(second)
        .with_hint("open one of the files by its own path");
  }

  const DirectoryFiles& files_;
  Metadata metadata_;
  std::map<std::string, std::string, std::less<>> file_of_;  // key -> file
};

template <typename Wanted>
std::vector<std::string> select(std::span<const std::string> names, const Wanted& wanted) {
  std::vector<std::string> selected;
  std::copy_if(names.begin(), names.end(), std::back_inserter(selected),
               [&](const std::string& name) { return is_top_level(name) && wanted(name); });
  return selected;
}

}  // namespace

std::vector<std::string> data_files(std::span<const std::string> names) {
  return select(names, [](std::string_view name) { return name.ends_with(kFileSuffix); });
}

std::vector<std::string> index_files_among(std::span<const std::string> names) {
  return select(names, [](std::string_view name) { return name.ends_with(kIndexSuffix); });
}

Metadata read_directory(const DirectoryFiles& files) { return FolderReader(files).run(); }

}  // namespace tilestone::safetensors
