#include "tilestone/format/zarr/key_conflicts_internal.h"

#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "tilestone/base/error.h"
#include "tilestone/format/zarr/names_internal.h"

namespace tilestone::zarr {
namespace {

class Conflicts {
 public:
  Conflicts(std::span<const NamedTensor> tensors, std::span<const std::string> objects) {
    for (const NamedTensor& tensor : tensors) dims_.emplace(tensor.key, tensor.dims);
    for (const std::string& key : objects) object_files_.insert(object_file(key));
  }

  // `path`: the array's directory or the object's file.
  void check(const std::string& key, const std::string& path, bool is_array) const {
    for (size_t slash = path.find('/'); slash != std::string::npos;
         slash = path.find('/', slash + 1)) {
      const std::string_view folder = std::string_view(path).substr(0, slash);
      if (object_files_.contains(std::string(folder))) refuse(key, "an object's file", folder);
      check_chunk(key, folder, std::string_view(path).substr(slash + 1));
    }
    if (is_array && object_files_.contains(path)) refuse(key, "an object's file", path);
  }

 private:
  // Refuses the key if `folder` is an array's directory and `rest`, the path below it, begins with
  // the name of one of the array's chunks.
  void check_chunk(const std::string& key, std::string_view folder, std::string_view rest) const {
    const auto array = dims_.find(std::string(folder));
    if (array == dims_.end()) return;
    const std::string_view name = rest.substr(0, rest.find('/'));
    if (!parse_chunk_name(name, array->second, '.')) return;
    refuse(key, "a chunk of \"" + array->first + "\"", array->first + "/" + std::string(name));
  }

  [[noreturn]] static void refuse(const std::string& key, const std::string& what,
                                  std::string_view path) {
    throw Error(ErrorCode::kInvalidArgument, "the key needs a directory at \"" + std::string(path) +
                                                 "\", where zarr stores " + what)
        .with_key(key)
        .with_hint("rename one of the two entries, or save in the torch_dist format");
  }

  std::unordered_map<std::string, size_t> dims_;
  std::unordered_set<std::string> object_files_;
};

}  // namespace

void check_conflicts(std::span<const NamedTensor> tensors, std::span<const std::string> objects) {
  const Conflicts conflicts(tensors, objects);
  for (const NamedTensor& tensor : tensors) conflicts.check(tensor.key, tensor.key, true);
  for (const std::string& key : objects) conflicts.check(key, object_file(key), false);
}

}  // namespace tilestone::zarr
