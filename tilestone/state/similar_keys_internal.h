// Which keys resemble one that was not found, for hints.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tilestone {

// The keys given to consider() must outlive the object.
class SimilarKeys {
 public:
  explicit SimilarKeys(std::string_view key);
  void consider(std::string_view other);
  // The most similar ones, at most `limit`, the best first.
  std::vector<std::string> best(size_t limit);

 private:
  std::string_view key_;
  size_t most_edits_;
  std::vector<std::pair<size_t, std::string_view>> found_;  // distance, key
};

}  // namespace tilestone
