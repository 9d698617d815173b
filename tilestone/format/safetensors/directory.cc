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
      return read_files({std::string(kOnlyFile)}, nullptr, "");
    }
    metadata_.writer = "safetensors (Hugging Face)";
    read_files({named.begin(), named.end()}, &map, index);
    for (const auto& [key, name] : map) {
      const auto found = file_of_.find(key);
      if (found != file_of_.end() && found->second == name) continue;
      throw Error(ErrorCode::kCorrupt,
                  "the index " + index + " says that this file has the tensor, but it has not")
          .with_key(key)
          .with_file(name);
    }
  }

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
    for (HeaderTensor& tensor : parse_header(json, read.size, name)) {
      if (map != nullptr) {
        const auto wanted = map->find(tensor.key);
        if (wanted != map->end() && wanted->second != name) continue;  // the index prefers another
      }
      const auto [known, is_new] = file_of_.emplace(tensor.key, name);
      if (!is_new) refuse_second(tensor.key, known->second, name);
      StoredTensor stored{.key = std::move(tensor.key),
                          .path = {},
                          .dtype = tensor.dtype,
                          .shape = tensor.shape,
                          .chunks = {}};
      if (tensor.begin < tensor.end) {
        const ItemLocation at{.file = file,
                              .codec = Codec::kNone,
                              .offset = kLengthBytes + size + tensor.begin,
                              .length = tensor.end - tensor.begin,
                              .checksums = {}};
        stored.chunks.push_back({Box::whole(stored.shape), at});
      }
      metadata_.tensors.push_back(std::move(stored));
    }
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
