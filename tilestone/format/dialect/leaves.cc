#include <utility>

#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/format/archive/value_check_internal.h"
#include "tilestone/format/dialect/leaves_internal.h"

namespace tilestone::dialect {
namespace {

// The local tensor for a template without memory. If there is one piece, it is that piece without
// prepended axes. A tensor with several pieces gets no memory here: the pieces hold what was
// loaded.
TensorView local_tensor(const TensorView& wanted, const std::vector<Piece>& pieces) {
  if (pieces.size() != 1) return wanted;
  TensorView data = pieces[0].data;
  if (data.shape == wanted.shape || numel(data.shape) != numel(wanted.shape)) return data;
  data.shape = wanted.shape;
  data.strides = contiguous_strides(wanted.shape);
  return data;
}

}  // namespace

std::string key_text(const Value& key) {
  return key.kind() == Value::Kind::kString ? key.as_string() : to_string(key);
}

TensorItem item_of(const TensorView& tensor, std::string key) {
  TensorItem item;
  item.key = std::move(key);
  item.dtype = tensor.dtype;
  item.global_shape = tensor.shape;
  item.common = true;
  item.pieces.push_back({Box::whole(tensor.shape), tensor});
  return item;
}

TensorItem item_of(const ShardedTensor& tensor) {
  TensorItem item;
  item.key = tensor.key;
  item.dtype = tensor.data.dtype;
  item.global_shape = tensor.global_shape;
  item.pieces = tensor.pieces;
  item.replica_id = tensor.replica_id;
  item.holders = tensor.holders;
  item.common = tensor.common;
  item.allow_shape_mismatch = tensor.allow_shape_mismatch;
  item.unknown_replicas = tensor.unknown_replicas;
  return item;
}

ObjectItem item_of(const ShardedObject& object) {
  ObjectItem item;
  item.key = object.unique_key();
  item.value = object.data;
  item.replica_id = object.replica_id;
  return item;
}

void check_value(const Value& value, const std::string& key) {
  with_key(key, [&] { archive::check_value(value); });
}

ShardedTensor filled(ShardedTensor tensor, const TensorItem& loaded) {
  if (loaded.pieces.size() != tensor.pieces.size()) disagree(loaded.key);
  tensor.pieces = loaded.pieces;
  if (!tensor.data.has_data()) tensor.data = local_tensor(tensor.data, loaded.pieces);
  return tensor;
}

void KeyClaims::claim(const std::string& key, Owner owner, const Path& path) {
  const auto [known, fresh] = owners_.emplace(key, owner);
  if (fresh || (owner == Owner::kShardedTensor && known->second == owner)) return;
  throw Error(ErrorCode::kInvalidArgument,
              "two leaves of the state dict have the same key; the second is at " + dotted(path))
      .with_key(key);
}

const TensorItem& LoadedItems::next_tensor(const std::string& key) {
  if (tensors_ >= items_.tensors.size()) disagree(key);
  const TensorItem& item = items_.tensors[tensors_++];
  if (item.key != key) disagree(key);
  return item;
}

const Value& LoadedItems::next_object(const std::string& key) {
  if (objects_ >= items_.objects.size()) disagree(key);
  const ObjectItem& item = items_.objects[objects_++];
  if (item.key != key) disagree(key);
  return item.value;
}

void LoadedItems::expect_end() const {
  if (tensors_ != items_.tensors.size() || objects_ != items_.objects.size()) disagree("");
}

void disagree(const std::string& key) {
  throw Error(ErrorCode::kInternal, "the loaded items don't match the template").with_key(key);
}

void refuse_unbuilt(const Path& path, std::string_view what) {
  throw Error(ErrorCode::kInternal, "the state dict still has a " + std::string(what))
      .with_key(dotted(path));
}

}  // namespace tilestone::dialect
