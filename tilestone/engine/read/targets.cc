#include "tilestone/engine/read/targets_internal.h"

#include <type_traits>
#include <utility>
#include <variant>

#include "tilestone/base/error.h"

namespace tilestone::engine {
namespace {

// The dim along which the pieces, one after the other, make up a local tensor of shape `local`.
size_t split_dim(const ShardedTensor& tensor, const Dims& local) {
  size_t dim = 0;
  for (size_t d = 0; d < local.size(); ++d) {
    if (tensor.pieces.front().data.shape[d] != local[d]) dim = d;
  }
  int64_t sum = 0;
  for (const Piece& piece : tensor.pieces) sum += piece.data.shape[dim];
  if (sum != local[dim]) {
    throw Error(ErrorCode::kUnsupported,
                "can't allocate memory for a tensor of several boxes; give a tensor with data")
        .with_key(tensor.key);
  }
  return dim;
}

TensorView under_shape(const TensorView& data, const Dims& shape) {
  TensorView view = TensorView::contiguous(data.data, data.dtype, shape, data.owner);
  return view;
}

void give_memory(ShardedTensor& tensor) {
  if (tensor.data.has_data()) return;
  const Dims local = tensor.data.shape;
  tensor.data = TensorView::allocate(tensor.data.dtype, local);
  if (tensor.pieces.size() == 1 && !tensor.flat_range && tensor.pieces[0].data.shape == local) {
    tensor.pieces[0].data = tensor.data;
    return;
  }
  const size_t dim = tensor.flat_range || tensor.pieces.empty() ? 0 : split_dim(tensor, local);
  int64_t begin = 0;
  for (Piece& piece : tensor.pieces) {
    const Dims shape = piece.data.shape;
    Box box = Box::whole(local);
    box.offset[dim] = begin;
    box.shape[dim] = tensor.flat_range ? numel(shape) : shape[dim];
    begin += box.shape[dim];
    piece.data = tensor.data.narrow(box);
    if (tensor.flat_range) piece.data = under_shape(piece.data, shape);
  }
}

// The depth of recursion is that of the caller's tree; it does not come from a file.
class Allocator {
 public:
  explicit Allocator(const KeptLeaves& kept) : kept_(kept) {}

  void visit(StateDict& dict) {
    for (auto& [element, child] : dict) at(element, child);
  }

 private:
  void visit(StateNode& node) {
    if (auto* view = node.get_if<TensorView>()) {
      if (view->has_data() || is_kept()) return;
      *view = TensorView::allocate(view->dtype, view->shape);
    } else if (auto* tensor = node.get_if<ShardedTensor>()) {
      if (!kept_.keys.contains(tensor->key)) give_memory(*tensor);
    } else if (auto* dict = node.get_if<StateDict>()) {
      visit(*dict);
    } else if (auto* list = node.get_if<StateList>()) {
      for (size_t i = 0; i < list->size(); ++i) at(static_cast<int64_t>(i), (*list)[i]);
    }
  }

  void at(const PathElement& element, StateNode& node) {
    path_.push_back(element);
    visit(node);
    path_.pop_back();
  }

  bool is_kept() const { return !kept_.paths.empty() && kept_.paths.contains(dotted(path_)); }

  const KeptLeaves& kept_;
  Path path_;
};

}  // namespace

StateDict with_memory(StateDict wanted, const KeptLeaves& kept) {
  Allocator(kept).visit(wanted);
  return wanted;
}

}  // namespace tilestone::engine
