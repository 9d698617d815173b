#include "tilestone/engine/open/look_around_internal.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "tilestone/base/error.h"
#include "tilestone/base/natural_order.h"
#include "tilestone/base/or_log.h"
#include "tilestone/engine/open/cleanup_internal.h"
#include "tilestone/engine/open/detect_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kMostLookedInto = 2000;  // subdirectories

bool is_checkpoint(Storage& storage, const std::string& directory) {
  const auto child = storage.child(directory);
  const std::vector<std::string> names = child->list_files();
  const auto read = [&](const std::string& name) { return read_file(*child, name, kAnySize); };
  return detect_readable(names, read).format != nullptr;
}

// The only name with one of the endings, or the first of several; "": there is none.
std::string name_with(std::span<const std::string> names,
                      std::initializer_list<std::string_view> endings) {
  for (const std::string& name : names) {
    if (name.find('/') != std::string::npos) continue;
    for (const std::string_view ending : endings) {
      if (name.ends_with(ending)) return name;
    }
  }
  return "";
}

// "": the directory is there.
std::string missing_hint(Storage& storage) {
  const auto entry = storage.parent();
  if (!entry || entry->storage->stat(entry->name)) return "";
  return "there is no such file or directory: is the path right?";
}

std::string hint_for(Storage& storage, std::span<const std::string> names) {
  if (names.empty()) {
    if (std::string missing = missing_hint(storage); !missing.empty()) return missing;
  }
  if (const std::string data = name_with(names, {".distcp"}); !data.empty()) {
    return "there are data files (" + data +
           ") but no .metadata, which makes them a checkpoint: was the save interrupted, or were "
           "hidden files not copied (cp -a FROM/. TO copies them)?";
  }
  if (const auto below = checkpoints_below(storage); below.size() == 1) {
    return "its subdirectory " + below[0] + " is a checkpoint: open that";
  } else if (below.size() > 1) {
    return std::to_string(below.size()) + " subdirectories are checkpoints, the last is " +
           below.back() + ": open one of them";
  }
  if (const std::string file = name_with(names, {".pt", ".pth", ".bin", ".ckpt"}); !file.empty()) {
    return file + " looks like a file of torch.save: open it by its own path";
  }
  return "";
}

}  // namespace

std::vector<std::string> checkpoints_below(Storage& storage) {
  std::vector<std::string> found;
  std::vector<std::string> directories = storage.list_directories();
  if (directories.size() > kMostLookedInto) directories.resize(kMostLookedInto);
  for (const std::string& directory : directories) {
    if (directory.starts_with('.')) continue;  // a save that is under way beside its location
    or_log(LogLevel::kDebug, "looking into " + directory, [&] {
      if (is_checkpoint(storage, directory)) found.push_back(directory);
    });
  }
  std::sort(found.begin(), found.end(),
            [](const std::string& a, const std::string& b) { return natural_less(a, b); });
  return found;
}

std::string look_around(Storage& storage, std::span<const std::string> names) {
  std::string hint;
  or_log(LogLevel::kDebug, "looking for checkpoints nearby",
         [&] { hint = hint_for(storage, names); });
  return hint;
}

}  // namespace tilestone::engine
