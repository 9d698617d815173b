// The keys of a checkpoint by number (tensors, then objects), and the sets of them that ranks send.
// A set is encoded as ascending runs, which is short when ranks leave out whole subtrees.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/items.h"
#include "tilestone/state/metadata.h"

namespace tilestone::engine {

inline size_t count_keys(const Metadata& stored) {
  return stored.tensors.size() + stored.objects.size();
}
const std::string& key_of(const Metadata& stored, size_t number);
const Path& path_of(const Metadata& stored, size_t number);

// The keys of a rank's items. The views refer to `items`.
std::unordered_set<std::string_view> keys_of(const Items& items);

// A set of numbers as runs. Numbers are added in ascending order.
class KeyRuns {
 public:
  void add(uint64_t number) {
    if (runs_.empty() || runs_.back().end != number) runs_.push_back({number, number});
    ++runs_.back().end;
  }
  void write(ByteWriter& writer) const;

 private:
  struct Run {
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  std::vector<Run> runs_;
};

// Counts, for each number, how many ranks have it in their runs.
class KeyCounts {
 public:
  explicit KeyCounts(size_t size) : changes_(size + 1) {}

  void add(ByteReader& reader);  // Error(kCorrupt) on a number beyond the size
  // The count of `number`. Call it once for each number from 0 on, in ascending order.
  int64_t next(size_t number) { return count_ += changes_[number]; }

 private:
  std::vector<int64_t> changes_;
  int64_t count_ = 0;
};

// "a, b, c, d, e and 7 more"; `keys` is not empty.
std::string list_keys(const std::vector<std::string>& keys);

}  // namespace tilestone::engine
