#include "python/src/writable.h"
#include "tilestone/base/memory_map.h"
#include "tilestone/state/node_walk.h"

namespace tilestone::python {
namespace {

// The range of bytes that contains a view's elements, gaps included.
struct Extent {
  const std::byte* begin = nullptr;
  uint64_t bytes = 0;
};

Extent extent_of(const TensorView& view) {
  if (view.data == nullptr || view.device || view.bytes() == 0) return {};
  // In elements. No overflow: the elements are inside an allocation, which `strided` has checked.
  int64_t below = 0, above = 0;
  for (size_t d = 0; d < view.shape.size(); ++d) {
    const int64_t reach = (view.shape[d] - 1) * view.strides[d];
    (reach < 0 ? below : above) += reach;
  }
  const auto size = static_cast<int64_t>(itemsize(view.dtype));
  return {view.data + below * size, static_cast<uint64_t>((above - below + 1) * size)};
}

[[noreturn]] void refuse(const std::string& key) {
  throw Error(ErrorCode::kInvalidArgument, "can't fill an array in memory that is mapped read-only")
      .with_key(key)
      .with_hint("map it for writing, or pass a copy (torch: tensor.clone())");
}

// Reads the memory map only if there is memory to check.
class WritableChecker {
 public:
  void visit(const StateNode& node, const Path& path) {
    if (const auto* view = node.get_if<TensorView>()) {
      check(*view, [&] { return dotted(path); });
    } else if (const auto* tensor = node.get_if<ShardedTensor>()) {
      check(tensor->data, [&] { return tensor->key; });
      for (const Piece& piece : tensor->pieces) check(piece.data, [&] { return tensor->key; });
    }
  }

 private:
  template <typename Key>
  void check(const TensorView& view, const Key& key) {
    const Extent extent = extent_of(view);
    if (extent.bytes == 0) return;
    if (!map_) map_.emplace();
    if (map_->is_writable(extent.begin, extent.bytes)) return;
    map_.emplace();  // a map that is read while other threads map memory may be incomplete
    if (!map_->is_writable(extent.begin, extent.bytes)) refuse(key());
  }

  std::optional<MemoryMap> map_;
};

}  // namespace

void check_writable(const TensorView& target, const std::string& key) {
  const Extent extent = extent_of(target);
  if (!is_writable_now(extent.begin, extent.bytes)) refuse(key);
}

void check_writable(const StateDict& wanted) {
  WritableChecker checker;
  for_each_node(wanted,
                [&](const StateNode& node, const Path& path) { checker.visit(node, path); });
}

}  // namespace tilestone::python
