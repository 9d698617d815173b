#include "tilestone/engine/read/missing_internal.h"

#include <algorithm>
#include <functional>
#include <string_view>
#include <unordered_set>

#include "tilestone/base/error.h"
#include "tilestone/state/sharded.h"

namespace tilestone::engine {
namespace {

constexpr size_t kListed = 5;
// What torch.compile, DistributedDataParallel and nested modules put before names.
constexpr std::string_view kPrefixes[] = {"_orig_mod.", "module.", "model."};

// The key without the first occurrence of the prefix that begins a part of it.
std::string stripped(const std::string& key, std::string_view prefix) {
  for (size_t at = key.find(prefix); at != std::string::npos; at = key.find(prefix, at + 1)) {
    if (at == 0 || key[at - 1] == '.') return key.substr(0, at) + key.substr(at + prefix.size());
  }
  return key;
}

void for_each_stored(const Metadata& metadata,
                     const std::function<void(const std::string&)>& visit) {
  for (const StoredTensor& tensor : metadata.tensors) visit(tensor.key);
  for (const StoredObject& object : metadata.objects) visit(object.key);
}

// Whether all `missing` keys are among the checkpoint's once the prefix is removed from those.
bool match_stripped(const std::vector<std::string>& missing, const Metadata& metadata,
                    std::string_view prefix) {
  std::unordered_set<std::string> keys;
  for_each_stored(metadata, [&](const std::string& key) {
    if (std::string other = stripped(key, prefix); other != key) keys.insert(std::move(other));
  });
  return std::all_of(missing.begin(), missing.end(),
                     [&](const std::string& key) { return keys.contains(key); });
}

// Whether they are once the prefix is removed from them.
bool match_with_prefix(const std::vector<std::string>& missing, const Metadata& metadata,
                       std::string_view prefix) {
  return std::all_of(missing.begin(), missing.end(), [&](const std::string& key) {
    const std::string other = key.starts_with(prefix) ? key.substr(prefix.size()) : key;
    return other != key &&
           (metadata.find_tensor(other) != nullptr || metadata.find_object(other) != nullptr);
  });
}

// A hint at the prefix that explains all missing keys; empty: there is none.
Hint prefix_hint(const std::vector<std::string>& missing, const Metadata& metadata) {
  for (const std::string_view prefix : kPrefixes) {
    const std::string quoted = "\"" + std::string(prefix) + "\"";
    if (match_stripped(missing, metadata, prefix)) {
      return {{"the checkpoint's keys have the prefix " + quoted},
              {"load with ", "rename", "strip_prefix(" + quoted + ")"}};
    }
    if (match_with_prefix(missing, metadata, prefix)) {
      return {{"the requested keys have the prefix " + quoted + ", which the checkpoint's lack"},
              {"load with ", "rename", "add_prefix(" + quoted + ")"}};
    }
  }
  return {};
}

// Whether the key is of a place in an object's grid, and the checkpoint has the object at others.
bool has_other_places(const Metadata& metadata, const std::string& key) {
  const std::string_view grid = grid_key(key);
  if (grid == key) return false;
  return std::any_of(metadata.objects.begin(), metadata.objects.end(),
                     [&](const StoredObject& object) {
                       return object.key != key && grid_key(object.key) == grid;
                     });
}

}  // namespace

Hint hint_at_missing(const Metadata& metadata, const std::string& key) {
  Hint hint{{"", "differences.not_in_checkpoint", "report", " loads the others"}};
  if (has_other_places(metadata, key)) {
    hint = {{"objects can't be resharded: request the places of the save"}};
  }
  if (std::string similar = similar_keys_hint(metadata, key); !similar.empty()) {
    hint.insert(hint.begin(), {std::move(similar)});
  }
  return hint;
}

void expect_all_stored(std::span<const TensorItem> tensors, const std::vector<std::string>& objects,
                       const Metadata& metadata) {
  std::vector<std::string> missing;
  for (const TensorItem& item : tensors) {
    const bool known = metadata.find_tensor(item.key) || metadata.find_object(item.key);
    if (!known && (missing.empty() || missing.back() != item.key)) missing.push_back(item.key);
  }
  for (const std::string& key : objects) {
    if (!metadata.find_tensor(key) && !metadata.find_object(key)) missing.push_back(key);
  }
  if (missing.empty()) return;
  Hint hint = prefix_hint(missing, metadata);
  if (missing.size() == 1 && hint.empty()) return;
  if (hint.empty()) hint = hint_at_missing(metadata, missing.front());
  std::string text = std::to_string(missing.size()) + " of " +
                     std::to_string(tensors.size() + objects.size()) +
                     " requested keys are not in the checkpoint: ";
  for (size_t i = 0; i < std::min(missing.size(), kListed); ++i) {
    text += (i > 0 ? ", " : "") + missing[i];
  }
  if (missing.size() > kListed) text += ", ...";
  throw Error(ErrorCode::kNotFound, text)
      .with_key(missing.front())
      .with_reason(Reason::kKeyNotStored)
      .with_hint(std::move(hint));
}

}  // namespace tilestone::engine
