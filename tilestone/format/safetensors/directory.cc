#include "tilestone/format/safetensors/directory_internal.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/size_text.h"
#include "tilestone/format/safetensors/delta_index.h"
#include "tilestone/format/safetensors/header_internal.h"
#include "tilestone/format/safetensors/weight_map_internal.h"
#include "tilestone/geometry/coverage.h"

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

// A piece of a tensor, of torch's HuggingFaceStorageWriter(save_distributed=True).
struct TensorPiece {
  HeaderTensor tensor;
  uint32_t file = 0;
  uint64_t data = 0;  // where the file's tensors begin, bytes
};

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
    if (index.empty()) note_missing(names);
    for (auto& [key, pieces] : pieces_) join(key, pieces);
    if (joins_) {
      note(
          "tensors are joined from the pieces that the ranks of a save wrote: if the files of its "
          "last "
          "ranks are missing, no file says so");
    }
  }

  // Of files that say how many there are: "model-00001-of-00002.safetensors".
  void note_missing(const std::vector<std::string>& names) {
    constexpr size_t kDigits = 5;
    const auto is_number = [](const std::string& text) {
      return text.size() == kDigits && text.find_first_not_of("0123456789") == std::string::npos;
    };
    std::map<std::pair<std::string, std::string>, size_t> here;  // by what is before and after it
    for (const std::string& name : names) {
      const size_t of = name.rfind("-of-");
      if (of == std::string::npos || of < kDigits || is_shard_name(name)) continue;
      if (!is_number(name.substr(of - kDigits, kDigits))) continue;
      here[{name.substr(0, of - kDigits), name.substr(of)}]++;
    }
    for (const auto& [name, count] : here) {
      const std::string total = name.second.substr(4, kDigits);
      if (!is_number(total) || count >= std::stoul(total)) continue;
      note("files are missing: of " + name.first + "?" + name.second + " only " +
           std::to_string(count) + (count == 1 ? " is" : " are") + " here, and no index");
    }
  }

  static ByteView header_of(const std::string& name, const FileParts& read) {
    const auto length = read.parts.find(0);
    const auto text = read.parts.find(kLengthBytes);
    const bool is_read = length != read.parts.end();
    const uint64_t size = is_read ? header_length(length->second, read.size, name) : 0;
    if (!is_read || (size > 0 && (text == read.parts.end() || text->second.size() != size))) {
      throw Error(ErrorCode::kInternal, "a header has not been read").with_file(name);
    }
    return size > 0 ? ByteView(text->second) : ByteView();
  }

  void read_file(const std::string& name, const FileParts& read, const WeightMap* map) {
    const ByteView json = header_of(name, read);
    const uint64_t begin = kLengthBytes + json.size();
    const auto file = static_cast<uint32_t>(metadata_.files.size());
    metadata_.files.push_back(name);
    std::vector<std::string> others;  // keys that the index gives to other files
    HeaderTexts metadata;
    for (HeaderTensor& tensor : parse_header(json, read.size, name, &metadata)) {
      if (map != nullptr) {
        const auto wanted = map->find(tensor.key);
        if (wanted != map->end() && wanted->second != name) {
          others.push_back(tensor.key);
          continue;
        }
      }
      take({std::move(tensor), file, begin}, map == nullptr);
    }
    if (metadata["format"] == kDeltaFormat) {
      note(name + " is a delta: its tensors are changes of weights, which apply_delta makes");
    }
    if (!others.empty()) note_others(name, others);
    const bool is_unsure =
        std::any_of(pieces_.begin(), pieces_.end(), [](const auto& key_and_pieces) {
          return !key_and_pieces.second.front().tensor.piece->whole;
        });
    if (is_unsure && is_shard_name(name) && files_.parts.size() == 1) {
      note(name +
           " is one rank's file: if other ranks have saved too, its tensors are only pieces, which "
           "it does not say");
    }
  }

  // `alone`: no index says which file counts.
  void take(TensorPiece found, bool alone) {
    const HeaderTensor& tensor = found.tensor;
    const std::string& name = metadata_.files[found.file];
    const auto [known, is_new] = file_of_.emplace(tensor.key, name);
    const bool may_be_piece = tensor.piece && alone && tensor.unsupported.empty();
    if (!is_new && !(may_be_piece && pieces_.contains(tensor.key))) {
      if (tensor.piece) refuse_piece(tensor, name);
      refuse_second(tensor.key, known->second, name);
    }
    if (may_be_piece) {
      pieces_[tensor.key].push_back(std::move(found));
    } else {
      if (tensor.piece && !may_be_whole(tensor)) refuse_piece(tensor, name);
      add(std::move(found));
    }
  }

  static bool may_be_whole(const HeaderTensor& tensor) {
    const SafetensorsPiece& piece = *tensor.piece;
    return piece.at == Dims(piece.at.size(), 0) &&
           piece.whole.value_or(tensor.shape) == tensor.shape;
  }

  // Torch's files don't have the shape of the whole: it is what all pieces cover.
  void join(const std::string& key, std::vector<TensorPiece>& pieces) {
    if (pieces.size() == 1 && may_be_whole(pieces[0].tensor)) {
      return add(std::move(pieces[0]));
    }
    const HeaderTensor& first = pieces.front().tensor;
    StoredTensor joined{
        .key = key, .path = {}, .dtype = first.dtype, .shape = first.shape, .chunks = {}};
    std::vector<Box> boxes;
    for (const TensorPiece& piece : pieces) {
      if (piece.tensor.dtype != first.dtype || piece.tensor.shape.size() != first.shape.size()) {
        throw Error(ErrorCode::kCorrupt,
                    "the pieces of this tensor have different dtypes or numbers of dims")
            .with_key(key)
            .with_file(metadata_.files[piece.file]);
      }
      const Box& box = boxes.emplace_back(Box{piece.tensor.piece->at, piece.tensor.shape});
      for (size_t d = 0; d < box.rank(); ++d) {
        if (box.offset[d] > INT64_MAX - box.shape[d]) {
          throw Error(ErrorCode::kCorrupt, "a piece of this tensor ends beyond any tensor")
              .with_key(key)
              .with_file(metadata_.files[piece.file]);
        }
        joined.shape[d] = std::max(joined.shape[d], box.offset[d] + box.shape[d]);
      }
      if (!box.empty()) joined.chunks.push_back({box, location_of(piece)});
    }
    const auto whole = std::find_if(pieces.begin(), pieces.end(), [](const TensorPiece& piece) {
      return piece.tensor.piece->whole.has_value();
    });
    if (whole != pieces.end()) take_shape(joined, *whole->tensor.piece->whole, pieces);
    expect_tiling(joined, boxes, pieces);
    joins_ = joins_ || (pieces.size() > 1 && whole == pieces.end());
    metadata_.tensors.push_back(std::move(joined));
  }

  // `joined` has the shape that the pieces cover.
  void take_shape(StoredTensor& joined, const Dims& whole, const std::vector<TensorPiece>& pieces) {
    for (const TensorPiece& piece : pieces) {
      bool fits = piece.tensor.piece->whole == whole;
      for (size_t d = 0; d < whole.size(); ++d) fits = fits && joined.shape[d] <= whole[d];
      if (fits) continue;
      throw Error(ErrorCode::kCorrupt, "the pieces of this tensor contradict the shape " +
                                           to_string(whole) + " that one of them records")
          .with_key(joined.key)
          .with_file(metadata_.files[piece.file]);
    }
    joined.shape = whole;
  }

  void expect_tiling(const StoredTensor& joined, std::span<const Box> boxes,
                     const std::vector<TensorPiece>& pieces) const {
    const auto fault = check_tiling(joined.shape, boxes);
    if (!fault) return;
    const auto file_of = [&](size_t piece) { return metadata_.files[pieces[piece].file]; };
    if (fault->kind != TilingFault::Kind::kUncovered) {
      throw Error(ErrorCode::kCorrupt, "the pieces of this tensor in " + file_of(fault->first) +
                                           " and " + file_of(fault->second) + " overlap")
          .with_key(joined.key)
          .with_file(file_of(fault->second));
    }
    throw Error(ErrorCode::kCoverage,
                "only pieces of this tensor are here, in " + counted(pieces.size(), "file") + " (" +
                    file_of(0) + (pieces.size() > 1 ? " and others" : "") +
                    "), and no piece has the elements " + to_string(fault->where) +
                    ": files of other ranks are missing")
        .with_key(joined.key)
        .with_file(file_of(0))
        .with_hint("open the folder that has the files of all ranks of the save");
  }

  // `keys`: those that the index gives to other files.
  void note_others(const std::string& name, const std::vector<std::string>& keys) {
    note(name + " also has " + std::to_string(keys.size()) +
         (keys.size() == 1 ? " key that" : " keys that") + " the index reads from other files: " +
         in_quotes(keys.front()) + (keys.size() == 1 ? "" : " and others"));
  }

  static ItemLocation location_of(const TensorPiece& piece) {
    return {.file = piece.file,
            .codec = Codec::kNone,
            .offset = piece.data + piece.tensor.begin,
            .length = piece.tensor.end - piece.tensor.begin,
            .checksums = {}};
  }

  void add(TensorPiece whole) {
    const ItemLocation at = location_of(whole);
    HeaderTensor& tensor = whole.tensor;
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
                "this is a piece of a tensor, at " + to_string(tensor.piece->at) +
                    ", and can't be joined: " +
                    (tensor.unsupported.empty() ? "the folder has an index or tensors of this name "
                                                  "that are no pieces"
                                                : "it has " + tensor.unsupported))
        .with_key(tensor.key)
        .with_file(file)
        .with_hint("open a folder that has the files of all ranks of one save, and no others");
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
  std::map<std::string, std::string, std::less<>> file_of_;  // key -> file, that of its first piece
  std::map<std::string, std::vector<TensorPiece>, std::less<>> pieces_;  // by key
  bool joins_ = false;  // a tensor has several, none of which says how large it is
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
