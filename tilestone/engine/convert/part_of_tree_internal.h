// The part of a source that a conversion takes.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/convert_source_internal.h"
#include "tilestone/state/items.h"

namespace tilestone::engine {

inline constexpr std::string_view kMegatron = "megatron";

// The part of the tree that ConvertOptions::only names.
class PartOfTree {
 public:
  PartOfTree(const ConvertSource& source, const std::string& name)
      : name_(name), prefix_(name + ".") {
    if (name.empty()) return;
    strips_ =
        std::any_of(source.entries.begin(), source.entries.end(),
                    [&](const SourceEntry& entry) { return entry.key().starts_with(prefix_); });
    for (const auto& [path, keys] : source.metadata().dict_keys) {
      strips_ = strips_ || (keys.empty && dotted(path).starts_with(prefix_));
    }
    if (strips_ || (name == "model" && source.dialect() == kMegatron)) return;
    throw Error(ErrorCode::kInvalidArgument, "the checkpoint has nothing below \"" + name + "\"")
        .with_hint("`tilestone ls --tree --depth 1` lists the parts; `keys` selects by pattern");
  }

  // The key and path inside the part; nullopt: it is elsewhere.
  std::optional<std::pair<std::string, Path>> find(const std::string& key, const Path& path,
                                                   bool object) const {
    if (name_.empty()) return std::pair(key, path);
    if (!strips_) {  // a Megatron-Core model
      const bool other = object || key.starts_with("optimizer") || key.starts_with("chained_");
      return other ? std::nullopt : std::optional(std::pair(key, path));
    }
    if (!key.starts_with(prefix_)) return std::nullopt;
    const bool has_path = path.size() > 1 && key_text(path[0]) == name_;
    return std::pair(key.substr(prefix_.size()),
                     has_path ? Path(path.begin() + 1, path.end()) : Path());
  }

  bool takes_common() const { return name_.empty(); }
  // What is recorded of the keys of dicts, by their paths inside the part. A dict that was empty on
  // one rank may have keys of another one.
  TreeKeys keys(const TreeKeys& keys) const {
    TreeKeys inside;
    for (const auto& [path, found] : keys) {
      if (!found.ints && found.others.empty()) continue;
      if (strips_ && (path.empty() || key_text(path[0]) != name_)) continue;
      inside.emplace(strips_ ? Path(path.begin() + 1, path.end()) : path,
                     DictKeys{.ints = found.ints, .others = found.others});
    }
    return inside;
  }

 private:
  const std::string& name_;
  const std::string prefix_;
  bool strips_ = false;
};

}  // namespace tilestone::engine
