#include <algorithm>

#include "tilestone/engine/read/key_runs_internal.h"

namespace tilestone::engine {
namespace {

constexpr size_t kMaxNamed = 5;

}  // namespace

const std::string& key_of(const Metadata& stored, size_t number) {
  const size_t tensors = stored.tensors.size();
  return number < tensors ? stored.tensors[number].key : stored.objects[number - tensors].key;
}

const Path& path_of(const Metadata& stored, size_t number) {
  const size_t tensors = stored.tensors.size();
  return number < tensors ? stored.tensors[number].path : stored.objects[number - tensors].path;
}

std::unordered_set<std::string_view> keys_of(const Items& items) {
  std::unordered_set<std::string_view> keys;
  for (const TensorItem& item : items.tensors) keys.insert(item.key);
  for (const ObjectItem& item : items.objects) keys.insert(item.key);
  return keys;
}

void KeyRuns::write(ByteWriter& writer) const {
  writer.varint(runs_.size());
  for (const Run& run : runs_) {
    writer.varint(run.begin);
    writer.varint(run.end - run.begin);
  }
}

void KeyCounts::add(ByteReader& reader) {
  for (uint64_t left = reader.count(2); left > 0; --left) {
    const uint64_t begin = reader.varint();
    const uint64_t length = reader.varint();
    if (begin >= changes_.size() || length >= changes_.size() - begin) {
      reader.fail("a run of keys that the checkpoint doesn't hold");
    }
    ++changes_[begin];
    --changes_[begin + length];
  }
}

std::string list_keys(const std::vector<std::string>& keys) {
  std::string text;
  for (size_t i = 0; i < std::min(keys.size(), kMaxNamed); ++i) {
    text += (i == 0 ? "" : ", ") + keys[i];
  }
  const size_t rest = keys.size() - std::min(keys.size(), kMaxNamed);
  return rest == 0 ? text : text + " and " + std::to_string(rest) + " more";
}

}  // namespace tilestone::engine
