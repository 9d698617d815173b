#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "tilestone/state/similar_keys_internal.h"

namespace tilestone {
namespace {

constexpr size_t kLongestComparedKey = 512;
constexpr size_t kMaxEdits = 8;

// How many characters must be inserted, removed or replaced to make one of the other; a larger
// number than `limit` if their lengths differ by more.
size_t edit_distance(std::string_view a, std::string_view b, size_t limit) {
  if (std::max(a.size(), b.size()) - std::min(a.size(), b.size()) > limit) return limit + 1;
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// Whether one key is the other with additional leading or trailing components ("model.weight" and
// "weight").
bool differ_by_components(std::string_view a, std::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  if (a.empty() || a.size() == b.size()) return false;
  return (b.ends_with(a) && b[b.size() - a.size() - 1] == '.') ||
         (b.starts_with(a) && b[a.size()] == '.');
}

}  // namespace

SimilarKeys::SimilarKeys(std::string_view key)
    : key_(key), most_edits_(std::min(kMaxEdits, key.size() / 4 + 1)) {}

void SimilarKeys::consider(std::string_view other) {
  if (std::max(key_.size(), other.size()) > kLongestComparedKey || other == key_) return;
  const size_t edits =
      differ_by_components(key_, other) ? 1 : edit_distance(key_, other, most_edits_);
  if (edits <= most_edits_) found_.emplace_back(edits, other);
}

std::vector<std::string> SimilarKeys::best(size_t limit) {
  const size_t count = std::min(limit, found_.size());
  std::partial_sort(found_.begin(), found_.begin() + static_cast<ptrdiff_t>(count), found_.end());
  std::vector<std::string> keys;
  for (size_t i = 0; i < count; ++i) keys.emplace_back(found_[i].second);
  return keys;
}

}  // namespace tilestone
