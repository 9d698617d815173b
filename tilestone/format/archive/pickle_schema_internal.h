// Helpers to read objects of known classes out of a Pickle.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "tilestone/base/dtype.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/geometry/box.h"

namespace tilestone::archive {

// Describes a node for messages: "module.name" of a global, "an object of module.name", or the kind
// of another node. Module and name are cut after 200 bytes each.
std::string describe(const Pickle& pickle, NodeId id);

// The elements of a tuple or list of ints >= 0. Error(kCorrupt), naming `what`, for other nodes.
Dims read_dims(const Pickle& pickle, NodeId id, std::string_view what);
// An int >= 0. Error(kCorrupt), naming `what`, for other nodes; a bool is not an int here.
int64_t read_large_count(const Pickle& pickle, NodeId id, std::string_view what);
inline int64_t read_count(const Pickle& pickle, NodeId id, std::string_view what) {
  return Pickle::is_small(id) ? pickle.integer(id) : read_large_count(pickle, id, what);
}
std::string_view read_string(const Pickle& pickle, NodeId id, std::string_view what);
// The dtype of a global such as torch.float32; nullopt if the node is not a known dtype.
std::optional<DType> read_dtype(const Pickle& pickle, NodeId id);

// Reads the fields of a dataclass from its state dict, in the order of `names`. The value of an
// absent field is kNoNode; other fields are skipped. The reader remembers keys by node: picklers
// memoise keys, so most objects of a class need no text comparison.
template <size_t N>
class FieldReader {
 public:
  explicit FieldReader(const std::array<std::string_view, N>& names) : names_(names) {}

  std::array<NodeId, N> read(const Pickle& pickle, NodeId state) {
    std::array<NodeId, N> values;
    values.fill(kNoNode);
    const auto items = pickle.items(state);
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      const size_t field = i / 2 < kRemembered && seen_[i / 2].key == items[i]
                               ? seen_[i / 2].field
                               : find(pickle, items[i], i / 2);
      if (field < N) values[field] = items[i + 1];
    }
    return values;
  }

 private:
  static constexpr size_t kRemembered = N;
  struct Seen {
    NodeId key = kNoNode;
    size_t field = N;
  };

  size_t find(const Pickle& pickle, NodeId key, size_t place) {
    size_t field = N;
    if (pickle.is(key, NodeKind::kString)) {
      const std::string_view text = pickle.text(key);
      for (field = 0; field < N && names_[field] != text; ++field) {
      }
    }
    if (place < kRemembered) seen_[place] = {key, field};
    return field;
  }

  std::array<std::string_view, N> names_;
  std::array<Seen, kRemembered> seen_;
};

}  // namespace tilestone::archive
