// Finds the keys that are similar to a key that was not found, for hints.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tilestone {

// `key` and the keys given to consider() must outlive this.
class SimilarKeys {
 public:
  explicit SimilarKeys(std::string_view key);
  void consider(std::string_view other);
  // Returns the most similar keys, best first, at most `limit`.
  std::vector<std::string> best(size_t limit);

 private:
  std::string_view key_;
  size_t most_edits_;
  std::vector<std::pair<size_t, std::string_view>> found_;  // (distance, key)
};

}  // namespace tilestone
