#include "tilestone/format/zarr/directory_internal.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/format/megatron_mark.h"
#include "tilestone/format/zarr/array_metadata_internal.h"
#include "tilestone/format/zarr/names_internal.h"
#include "tilestone/geometry/grid.h"

namespace tilestone::zarr {
namespace {

const std::string kIndexName(kMegatronConfig);
constexpr std::string_view kLockSuffix = ".sync";
constexpr std::string_view kOwnFolder = ".tilestone/";

std::string_view folder_of(std::string_view name) {
  const size_t slash = name.rfind('/');
  return slash == std::string_view::npos ? std::string_view() : name.substr(0, slash);
}

// Whether `folders` contains one of the folders above `name`.
template <typename Folders>
bool lies_in(const Folders& folders, std::string_view name) {
  if (folders.empty()) return false;
  for (std::string_view folder = folder_of(name); !folder.empty(); folder = folder_of(folder)) {
    if (folders.contains(folder)) return true;
  }
  return false;
}

// The wanted names that belong to this checkpoint. Leaves out the files of checkpoints in
// subfolders and Tilestone's own files.
template <typename Wanted>
std::vector<std::string> select(std::span<const std::string> names, const Wanted& wanted) {
  std::set<std::string_view> nested;
  for (const std::string_view name : names) {
    const std::string_view base = name.substr(name.rfind('/') + 1);
    const bool describes = base == kIndexName || base == ".metadata";
    if (describes && !folder_of(name).empty()) nested.insert(folder_of(name));
  }
  std::vector<std::string> selected;
  for (const std::string& name : names) {
    if (!name.starts_with(kOwnFolder) && wanted(name) && !lies_in(nested, name)) {
      selected.push_back(name);
    }
  }
  return selected;
}

[[noreturn]] void corrupt(const std::string& problem, const std::string& file) {
  throw Error(ErrorCode::kCorrupt, problem).with_file(file);
}

void check_backend(ByteView text) {
  const auto config = read_megatron_config(text);
  if (!config) corrupt("the file is not a JSON object with a sharded_backend", kIndexName);
  if (config->backend != kBackend) {
    throw Error(ErrorCode::kUnsupported, "expected the sharded_backend \"zarr\", found \"" +
                                             config->backend.substr(0, 40) + "\"")
        .with_file(kIndexName);
  }
  if (config->version.value_or(kBackendVersion) != kBackendVersion) {
    throw Error(ErrorCode::kUnsupported,
                "the sharded_backend_version is not 1; other versions of the zarr backend are not "
                "supported")
        .with_file(kIndexName);
  }
}

class DirectoryReader {
 public:
  explicit DirectoryReader(const DirectoryFiles& files) : files_(files) {}

  Metadata run() {
    check_backend(content(kIndexName));
    metadata_.writer = "Megatron-Core (zarr 1)";
    for (const std::string& name : description_files(files_.names)) {
      const auto key = key_of_array_file(name);
      if (key && !is_lock(*key, content(name))) read_array(*key, content(name), name);
    }
    refuse_orphans();
    read_objects();
    metadata_.index();
    return std::move(metadata_);
  }

 private:
  ByteView content(const std::string& name) const {
    const auto found = files_.contents.find(name);
    if (found == files_.contents.end()) {
      throw Error(ErrorCode::kInternal, "an index file has not been read").with_file(name);
    }
    return found->second;
  }

  // Whether it is a lock that Megatron-Core makes when several ranks write one chunk:
  // "KEY.sync/.zarray".
  bool is_lock(const std::string& key, ByteView text) {
    if (!text.empty() || !key.ends_with(kLockSuffix)) return false;
    const std::string locked = key.substr(0, key.size() - kLockSuffix.size());
    if (!files_.contents.contains(array_file(locked))) return false;
    locks_.insert(key);
    return true;
  }

  ItemLocation location_of(const std::string& name) {
    ItemLocation at{.file = static_cast<uint32_t>(metadata_.files.size())};
    const auto size = files_.sizes.find(name);
    if (size == files_.sizes.end()) {
      throw Error(ErrorCode::kInternal, "the size of a file is not known").with_file(name);
    }
    at.length = size->second;
    metadata_.files.push_back(name);
    return at;
  }

  void read_array(const std::string& key, ByteView text, const std::string& file) {
    const ArrayMetadata array = parse_array(text, file);
    StoredTensor tensor{.key = key,
                        .path = {},
                        .dtype = array.dtype,
                        .shape = array.shape,
                        .chunks = {},
                        .chunk_shape = array.chunk_shape,
                        .fortran_order = array.fortran};
    const std::string folder = key + "/";
    const auto begin = files_.sizes.lower_bound(folder);
    for (auto entry = begin; entry != files_.sizes.end(); ++entry) {
      const std::string& name = entry->first;
      if (!name.starts_with(folder)) break;
      const auto rest = std::string_view(name).substr(folder.size());
      const auto index = parse_chunk_name(rest, array.shape.size(), array.separator);
      if (!index) continue;
      const auto box = cell_box(*index, array.shape, array.chunk_shape);
      if (!box) {
        corrupt("the file is named as a chunk outside its array, which has the shape " +
                    to_string(array.shape) + " and chunks of shape " + to_string(array.chunk_shape),
                name);
      }
      chunk_files_.insert(name);
      tensor.chunks.push_back({*box, location_of(name)});
    }
    std::sort(tensor.chunks.begin(), tensor.chunks.end(),
              [](const StoredChunk& a, const StoredChunk& b) { return a.box < b.box; });
    arrays_.insert(key);
    if (array.separator == '/') slash_arrays_.insert(key);
    metadata_.tensors.push_back(std::move(tensor));
  }

  // Refuses chunks without a `.zarray`, and chunks that the array does not have.
  void refuse_orphans() const {
    for (const std::string& name : item_files(files_.names)) {
      if (!resembles_chunk_name(name) || chunk_files_.contains(name)) continue;
      if (folder_of(name).empty() || lies_in(locks_, name)) continue;
      const bool in_array = arrays_.contains(folder_of(name)) || lies_in(slash_arrays_, name);
      if (in_array) corrupt("the file is named as a chunk, but its array has no such chunk", name);
      corrupt("the file is missing, but there are chunks of its array",
              array_file(folder_of(name)));
    }
  }

  void read_objects() {
    const std::vector<std::string> names = item_files(files_.names);
    // The last dim's size in grids whose shape is cut in the names (ObjectCell::shape_is_cut()).
    std::map<std::string, int64_t, std::less<>> last_extents;
    for (const std::string& name : names) {
      const auto key = key_of_object_file(name);
      const auto cell = key ? parse_object_cell(*key) : std::nullopt;
      if (!cell || !cell->shape_is_cut()) continue;
      if (cell->offset.back() == INT64_MAX) {
        corrupt("the object's cell in its grid is out of range", name);
      }
      int64_t& extent = last_extents[std::string(cell->key)];
      extent = std::max(extent, cell->offset.back() + 1);
    }
    for (const std::string& name : names) {
      auto key = key_of_object_file(name);
      if (!key || lies_in(locks_, name)) continue;
      const auto grid_cell = parse_object_cell(*key);
      if (grid_cell && grid_cell->shape_is_cut()) {
        *key += "." + std::to_string(last_extents.find(grid_cell->key)->second);
      }
      metadata_.objects.push_back({std::move(*key), {}, location_of(name)});
    }
  }

  const DirectoryFiles& files_;
  Metadata metadata_;
  std::set<std::string, std::less<>> arrays_;        // keys
  std::set<std::string, std::less<>> slash_arrays_;  // keys of arrays with chunks in folders
  std::set<std::string, std::less<>> locks_;         // folders
  std::set<std::string, std::less<>> chunk_files_;   // names
};

}  // namespace

std::vector<std::string> description_files(std::span<const std::string> names) {
  return select(names, [](std::string_view name) {
    return name == kIndexName || key_of_array_file(name).has_value();
  });
}

std::vector<std::string> item_files(std::span<const std::string> names) {
  return select(names, [](std::string_view name) {
    return resembles_chunk_name(name) || key_of_object_file(name).has_value();
  });
}

Metadata read_directory(const DirectoryFiles& files) { return DirectoryReader(files).run(); }

}  // namespace tilestone::zarr
