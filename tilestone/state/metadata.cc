#include "tilestone/state/metadata.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"

namespace tilestone {
namespace {

template <typename Stored>
void sort_by_key(std::vector<Stored>& items) {
  const auto before = [](const Stored& a, const Stored& b) { return a.key < b.key; };
  if (!std::is_sorted(items.begin(), items.end(), before)) {
    std::sort(items.begin(), items.end(), before);
  }
  const auto twice = std::adjacent_find(
      items.begin(), items.end(), [](const Stored& a, const Stored& b) { return a.key == b.key; });
  if (twice != items.end()) {
    throw Error(ErrorCode::kCorrupt, "the checkpoint's metadata has a key twice")
        .with_key(twice->key);
  }
}

template <typename Stored>
const Stored* find_in(const std::vector<Stored>& items, std::string_view key) {
  const auto found =
      std::lower_bound(items.begin(), items.end(), key,
                       [](const Stored& item, std::string_view k) { return item.key < k; });
  return found != items.end() && found->key == key ? &*found : nullptr;
}

}  // namespace

void Metadata::index() {
  sort_by_key(tensors);
  sort_by_key(objects);
  for (const StoredObject& object : objects) {
    if (find_tensor(object.key) != nullptr) {
      throw Error(ErrorCode::kCorrupt,
                  "the checkpoint's metadata has a key twice, as a tensor and as an object")
          .with_key(object.key);
    }
  }
}

const StoredTensor* Metadata::find_tensor(std::string_view key) const {
  return find_in(tensors, key);
}

const StoredObject* Metadata::find_object(std::string_view key) const {
  return find_in(objects, key);
}

uint64_t Metadata::tensor_bytes() const {
  uint64_t total = 0;
  for (const StoredTensor& tensor : tensors) {
    const uint64_t bytes = checked_mul(static_cast<uint64_t>(numel(tensor.shape)),
                                       itemsize(tensor.dtype), "bytes of tensor " + tensor.key);
    total = checked_add(total, bytes, "bytes of all tensors");
  }
  return total;
}

namespace {

constexpr size_t kLongestComparedKey = 512;
constexpr size_t kMostEdits = 8;

// Edit distance of two short strings, `limit` + 1 where it is larger than `limit`. Only the band
// of the table that can matter is computed.
size_t edit_distance(std::string_view a, std::string_view b, size_t limit) {
  const size_t too_far = limit + 1;
  if (std::max(a.size(), b.size()) - std::min(a.size(), b.size()) > limit) return too_far;
  std::vector<size_t> row(b.size() + 1, too_far);
  for (size_t j = 0; j <= std::min(b.size(), limit); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    const size_t first = i > limit ? i - limit : 1;
    const size_t last = std::min(b.size(), i + limit);
    size_t diagonal = row[first - 1];
    row[first - 1] = first == 1 && i <= limit ? i : too_far;
    size_t best = row[first - 1];
    for (size_t j = first; j <= last; ++j) {
      const size_t above = j < i + limit ? row[j] : too_far;
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, above + 1, row[j - 1] + 1, too_far});
      best = std::min(best, row[j]);
    }
    if (best > limit) return too_far;
  }
  return row[b.size()];
}

// Is one key the other with leading or trailing components ("model.weight", "weight")?
bool differ_by_components(std::string_view a, std::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  if (a.empty() || a.size() == b.size()) return false;
  return (b.ends_with(a) && b[b.size() - a.size() - 1] == '.') ||
         (b.starts_with(a) && b[a.size()] == '.');
}

}  // namespace

std::vector<std::string> similar_keys(const Metadata& metadata, std::string_view key,
                                      size_t limit) {
  if (key.size() > kLongestComparedKey) return {};
  const size_t most_edits = std::min(kMostEdits, key.size() / 4 + 1);
  std::vector<std::pair<size_t, std::string_view>> found;  // distance, key
  const auto consider = [&](std::string_view other) {
    if (other.size() > kLongestComparedKey || other == key) return;
    const size_t edits =
        differ_by_components(key, other) ? 1 : edit_distance(key, other, most_edits);
    if (edits <= most_edits) found.emplace_back(edits, other);
  };
  for (const StoredTensor& tensor : metadata.tensors) consider(tensor.key);
  for (const StoredObject& object : metadata.objects) consider(object.key);
  const size_t count = std::min(limit, found.size());
  std::partial_sort(found.begin(), found.begin() + static_cast<ptrdiff_t>(count), found.end());
  std::vector<std::string> keys;
  for (size_t i = 0; i < count; ++i) keys.emplace_back(found[i].second);
  return keys;
}

}  // namespace tilestone
