#include "tilestone/engine/convert/selection_internal.h"

#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/engine/convert/rename_rules_internal.h"
#include "tilestone/engine/read/everything_internal.h"

namespace tilestone::engine {
namespace {

bool is_cast(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

// A cast keeps what the values mean; integers, bool and exponents would not.
void check_cast(DType dtype) {
  const bool has_fractions = is_cast(dtype) || dtype == DType::kFloat8E4M3FN ||
                             dtype == DType::kFloat8E4M3FNUZ || dtype == DType::kFloat8E5M2 ||
                             dtype == DType::kFloat8E5M2FNUZ;
  if (has_fractions) return;
  throw Error(ErrorCode::kInvalidArgument,
              "can't cast to " + std::string(to_string(dtype)) + ", which loses what values mean")
      .with_hint("cast to float16, bfloat16, float32, float64 or a float8 with a sign");
}

// Python pickles strings with lone surrogates, but no other reader takes them as keys.
void check_text(const std::string& key) {
  for (size_t at = key.find('\xed'); at != std::string::npos; at = key.find('\xed', at + 1)) {
    if (at + 1 == key.size() || static_cast<unsigned char>(key[at + 1]) < 0xa0) continue;
    throw Error(ErrorCode::kUnsupported, "the key is not UTF-8: it has a lone surrogate")
        .with_key(key)
        .with_hint("rename it (`--rename`), or leave it out (`--keys`)");
  }
}

// The path of a renamed key: as much of the old path as the new key still begins with, and the rest
// as one element.
Path renamed_path(const Path& path, const std::string& from, const std::string& to) {
  if (from == to) return path;
  Path kept;
  std::string begin;
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    begin += key_text(path[i]) + ".";
    if (!to.starts_with(begin) || to.size() == begin.size()) break;
    kept.push_back(path[i]);
  }
  const size_t used = kept.empty() ? 0 : dotted(kept).size() + 1;
  kept.emplace_back(to.substr(used));
  return kept;
}

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

class Selecting {
 public:
  Selecting(const ConvertSource& source, const ConvertOptions& options)
      : options_(options), source_(source), part_(source, options.only), rules_(options.rename) {}

  Selection all() {
    for (const SourceEntry& entry : source_.entries) {
      auto place = place_of(entry.key(), entry.path(), entry.object != nullptr);
      if (!place) {
        ++found_.left_out;
        continue;
      }
      if (entry.object != nullptr) expect_supported(*entry.object);
      Chosen chosen{entry.key(), std::move(place->first), std::move(place->second), &entry};
      if (chosen.is_tensor()) chosen.dtype = entry.tensor->dtype;
      if (options_.cast && is_cast(chosen.dtype)) chosen.dtype = *options_.cast;
      found_.chosen.push_back(std::move(chosen));
    }
    found_.dict_keys = part_.keys(source_.metadata().dict_keys);
    sort_by_new_key();
    choose_empty_dicts();
    expect_matches();
    if (part_.takes_common() && options_.keys.empty()) found_.common = source_.common;
    const bool has_any =
        !found_.chosen.empty() || found_.has_common() || !found_.empty_dicts.empty();
    if (!has_any && !(is_empty_source() && options_.keys.empty())) {
      throw Error(ErrorCode::kInvalidArgument, "nothing is selected: the checkpoint has " +
                                                   std::to_string(found_.left_out) +
                                                   " keys, and the options leave out all of them")
          .with_hint("`tilestone ls` lists the keys");
    }
    return std::move(found_);
  }

 private:
  // The new key and path; nullopt: it is left out.
  std::optional<std::pair<std::string, Path>> place_of(const std::string& key, const Path& path,
                                                       bool object) {
    const auto inside = part_.find(key, path, object);
    if (!is_named(key) || !inside) return std::nullopt;
    std::string to = rules_.apply(inside->first);
    if (options_.rename_by && !to.empty()) to = options_.rename_by(to);
    if (to.empty() && !inside->first.empty()) return std::nullopt;  // by a rule
    check_text(to);
    Path place = renamed_path(inside->second, inside->first, to);
    return std::pair(std::move(to), std::move(place));
  }

  // Whether ConvertOptions::keys takes the key.
  bool is_named(const std::string& key) {
    bool found = options_.keys.empty();
    for (const std::string& pattern : options_.keys) {
      if (fnmatch(pattern.c_str(), key.c_str(), 0) != 0) continue;
      matched_.insert(pattern);
      found = true;
    }
    return found;
  }

  void expect_matches() const {
    for (const std::string& pattern : options_.keys) {
      if (matched_.contains(pattern)) continue;
      const std::string similar = similar_keys_hint(source_.metadata(), pattern);
      throw Error(ErrorCode::kInvalidArgument, "no key matches \"" + pattern + "\"")
          .with_hint(similar.empty() ? "`tilestone ls` lists the keys" : similar);
    }
  }

  // A state without keys was saved.
  bool is_empty_source() const {
    return source_.entries.empty() && source_.metadata().dict_keys.empty() &&
           (!source_.common || source_.common->as_dict().empty());
  }

  void sort_by_new_key() {
    std::vector<Chosen>& all = found_.chosen;
    std::sort(all.begin(), all.end(), [](const Chosen& a, const Chosen& b) { return a.to < b.to; });
    for (size_t i = 1; i < all.size(); ++i) {
      if (all[i].to == all[i - 1].to) refuse_same_name(all[i - 1].from, all[i].from, all[i].to);
    }
  }

  [[noreturn]] static void refuse_same_name(const std::string& one, const std::string& other,
                                            const std::string& to) {
    throw Error(ErrorCode::kInvalidArgument,
                "\"" + one + "\" and \"" + other + "\" get the same new key")
        .with_key(to)
        .with_hint("change the rules that rename keys");
  }

  // Refuses an empty dict where an item is at its place in the new tree, or above it.
  static void expect_free(const Path& place, const std::string& from,
                          const std::map<Path, const Chosen*>& taken) {
    for (Path above = place; !above.empty(); above.pop_back()) {
      const auto found = taken.find(above);
      if (found != taken.end()) refuse_same_name(found->second->from, from, found->second->to);
    }
  }

  // An empty dict is selected and renamed like a key.
  void choose_empty_dicts() {
    const std::vector<Path> empty = empty_dicts(source_.metadata());
    if (empty.empty()) return;
    std::map<Path, const Chosen*> taken;
    for (const Chosen& chosen : found_.chosen) {
      taken.emplace(chosen.path.empty() ? Path{chosen.to} : chosen.path, &chosen);
    }
    for (const Path& path : empty) {
      const std::string key = dotted(path);
      const auto place = place_of(key, path, true);
      if (!place) continue;
      expect_free(place->second, key, taken);
      DictKeys& keys = found_.dict_keys[place->second];
      keys.empty = true;
      keys.order = source_.metadata().dict_keys.at(path).order;
      found_.empty_dicts.push_back(key);
    }
  }

  const ConvertOptions& options_;
  const ConvertSource& source_;
  const PartOfTree part_;
  const RenameRules rules_;
  std::set<std::string> matched_;  // those of ConvertOptions::keys that match a key
  Selection found_;
};

}  // namespace

Selection select(const ConvertSource& source, const ConvertOptions& options) {
  if (options.cast) check_cast(*options.cast);
  return Selecting(source, options).all();
}

}  // namespace tilestone::engine
