#include "tilestone/engine/read/targets_internal.h"

#include <type_traits>
#include <utility>
#include <variant>

#include "tilestone/base/error.h"
#include "tilestone/state/node_walk.h"

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

}  // namespace

StateDict with_memory(StateDict wanted, const KeptLeaves& kept) {
  for_each_node(wanted, [&](StateNode& node, const Path& path) {
    if (auto* view = node.get_if<TensorView>()) {
      if (view->has_data() || (!kept.paths.empty() && kept.paths.contains(dotted(path)))) return;
      *view = TensorView::allocate(view->dtype, view->shape);
    } else if (auto* tensor = node.get_if<ShardedTensor>()) {
      if (!kept.keys.contains(tensor->key)) give_memory(*tensor);
    }
  });
  return wanted;
}

}  // namespace tilestone::engine
