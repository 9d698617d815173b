#include "tilestone/state/sharded.h"

#include <algorithm>
#include <utility>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/base/error_context.h"
#include "tilestone/state/folded_memory_internal.h"

namespace tilestone {
namespace {

constexpr int64_t kMaxPrependedAxes = 64;
constexpr std::string_view kShardInfix = "/shard_";

[[noreturn]] void refuse(const std::string& key, const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, problem).with_key(key);
}

// Checks that apply to every way of describing a sharded tensor.
void check_common(const std::string& key, const TensorView& data, const ReplicaId& replica_id,
                  int64_t prepend_axis_num) {
  if (data.strides.size() != data.shape.size()) {
    refuse(key, "data: strides " + to_string(data.strides) + " don't have as many dims as shape " +
                    to_string(data.shape));
  }
  with_key(key, [&] { return data.bytes(); });
  if (prepend_axis_num < 0 || prepend_axis_num > kMaxPrependedAxes) {
    refuse(key, "prepend_axis_num " + std::to_string(prepend_axis_num) + " is not between 0 and " +
                    std::to_string(kMaxPrependedAxes));
  }
  for (int64_t id : replica_id) {
    if (id < 0) refuse(key, "replica_id " + to_string(replica_id) + " has a negative component");
  }
}

// `local` with a dim of size 1 for each prepended axis.
Dims with_prepended(const Dims& local, int64_t prepend_axis_num) {
  Dims shape(static_cast<size_t>(prepend_axis_num), 1);
  for (int64_t n : local) shape.push_back(n);
  return shape;
}

void check_offset(const std::string& key, const RankOffset& o, size_t dims) {
  const std::string axis = "axis " + std::to_string(o.axis);
  if (o.axis < 0) refuse(key, "rank_offsets: " + axis + " is negative");
  if (static_cast<uint64_t>(o.axis) >= dims) {
    refuse(key, "rank_offsets: " + axis + " is out of range for a tensor of " +
                    std::to_string(dims) + " dims, prepended axes included");
  }
  const std::string rank = "rank " + std::to_string(o.rank) + " of " + axis;
  if (o.rank < 0) refuse(key, "rank_offsets: " + rank + " is negative");
  if (o.fragments < 1) {
    refuse(key, "rank_offsets: fragments " + std::to_string(o.fragments) + " of " + axis +
                    " is less than 1");
  }
  if (o.rank >= o.fragments) {
    refuse(key,
           "rank_offsets: " + rank + " is not less than fragments " + std::to_string(o.fragments));
  }
}

// A cell of a regular grid: its box and the shape of the whole tensor.
struct Cell {
  Box box;
  Dims global_shape;
};

Cell cell_of(const std::string& key, const Dims& local_shape, std::span<const RankOffset> offsets,
             int64_t prepend_axis_num) {
  Cell cell;
  cell.box = Box::whole(with_prepended(local_shape, prepend_axis_num));
  cell.global_shape = cell.box.shape;
  std::vector<bool> named(cell.box.rank(), false);
  for (const RankOffset& o : offsets) {
    check_offset(key, o, cell.box.rank());
    const auto axis = static_cast<size_t>(o.axis);
    if (named[axis]) {
      refuse(key, "rank_offsets: axis " + std::to_string(axis) + " is named twice");
    }
    named[axis] = true;
    with_key(key, [&] {
      const int64_t n = cell.box.shape[axis];
      cell.global_shape[axis] = checked_mul(n, o.fragments, "global size of an axis");
      cell.box.offset[axis] = n * o.rank;
    });
  }
  with_key(key, [&] { return numel(cell.global_shape); });
  return cell;
}

// The same elements in C order under another shape. `data` is 1-D.
TensorView fold(const TensorView& data, const Dims& shape) {
  TensorView folded = data;
  folded.shape = shape;
  folded.strides = contiguous_strides(shape);
  if (data.device != nullptr) {
    folded.device = state_internal::fold_memory(data.device, shape, itemsize(data.dtype));
  } else {
    for (int64_t& stride : folded.strides) stride *= data.strides[0];
  }
  return folded;
}

// Pieces are not empty. The exception is a tensor without any elements: it has one empty piece, the
// whole tensor, so that every rank that knows the tensor holds the same.
bool has_elements(const Dims& global_shape) { return numel(global_shape) > 0; }

Piece whole_empty_piece(DType dtype, const Dims& global_shape) {
  return {Box::whole(global_shape), TensorView::without_data(dtype, global_shape)};
}

Box bounding(const std::vector<Box>& boxes) {
  Box all = boxes.front();
  for (const Box& box : boxes) {
    for (size_t d = 0; d < all.rank(); ++d) {
      const int64_t end = std::max(all.end(d), box.end(d));
      all.offset[d] = std::min(all.offset[d], box.offset[d]);
      all.shape[d] = end - all.offset[d];
    }
  }
  return all;
}

// The pieces of the 1-D `data`, which is the slice `range` of the flattened cell.
std::vector<Piece> flat_pieces(const TensorView& data, const Dims& local_shape, FlatRange range,
                               const Cell& cell, int64_t prepend_axis_num) {
  std::vector<Piece> pieces;
  if (!has_elements(cell.global_shape)) return {whole_empty_piece(data.dtype, cell.global_shape)};
  int64_t begin = 0;
  for (const Box& local : flat_range_to_boxes(local_shape, range)) {
    Box box = cell.box;
    for (size_t d = 0; d < local.rank(); ++d) {
      const size_t axis = d + static_cast<size_t>(prepend_axis_num);
      box.offset[axis] += local.offset[d];
      box.shape[axis] = local.shape[d];
    }
    const int64_t count = local.numel();
    pieces.push_back({std::move(box), fold(data.narrow({{begin}, {count}}), local.shape)});
    begin += count;
  }
  return pieces;
}

// Runs `body`, which merges or reads placements, and adds key and rank to its errors.
template <typename Body>
auto naming_rank(const std::string& key, int rank, Body&& body) {
  return with_key(key, [&] {
    try {
      return body();
    } catch (Error& error) {
      throw error.with_rank(rank);
    }
  });
}

std::vector<int> ascending(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// Sets the tensor's box and pieces from what the rank holds. Its global shape must be set.
void hold(ShardedTensor& tensor, const LocalBoxes& held) {
  tensor.box = bounding(held.boxes);
  if (!has_elements(tensor.global_shape)) {
    tensor.pieces.push_back(whole_empty_piece(tensor.data.dtype, tensor.global_shape));
    return;
  }
  for (size_t i = 0; i < held.boxes.size(); ++i) {
    if (held.boxes[i].empty()) continue;
    tensor.pieces.push_back({held.boxes[i], tensor.data.narrow(held.locals[i])});
  }
}

}  // namespace

bool is_main_replica(const ReplicaId& id) {
  return std::all_of(id.begin(), id.end(), [](int64_t part) { return part == 0; });
}

ShardedTensor ShardedTensor::from_rank_offsets(std::string key, TensorView data,
                                               std::span<const RankOffset> offsets,
                                               ReplicaId replica_id, int64_t prepend_axis_num) {
  check_common(key, data, replica_id, prepend_axis_num);
  const Cell cell = cell_of(key, data.shape, offsets, prepend_axis_num);
  return from_box(std::move(key), std::move(data), cell.global_shape, cell.box,
                  std::move(replica_id), prepend_axis_num);
}

ShardedTensor ShardedTensor::from_rank_offsets(std::string key, TensorView data,
                                               std::initializer_list<RankOffset> offsets,
                                               ReplicaId replica_id, int64_t prepend_axis_num) {
  return from_rank_offsets(std::move(key), std::move(data),
                           std::span<const RankOffset>(offsets.begin(), offsets.size()),
                           std::move(replica_id), prepend_axis_num);
}

ShardedTensor ShardedTensor::from_rank_offsets_flat(std::string key, TensorView data,
                                                    const Dims& local_shape, FlatRange flat_range,
                                                    std::span<const RankOffset> offsets,
                                                    ReplicaId replica_id,
                                                    int64_t prepend_axis_num) {
  check_common(key, data, replica_id, prepend_axis_num);
  const Cell cell = cell_of(key, local_shape, offsets, prepend_axis_num);
  return from_box_flat(std::move(key), std::move(data), cell.global_shape, cell.box, flat_range,
                       std::move(replica_id), prepend_axis_num);
}

ShardedTensor ShardedTensor::from_box_flat(std::string key, TensorView data,
                                           const Dims& global_shape, const Box& box,
                                           FlatRange flat_range, ReplicaId replica_id,
                                           int64_t prepend_axis_num) {
  check_common(key, data, replica_id, prepend_axis_num);
  with_key(key, [&] {
    numel(global_shape);
    check_bounds(box, global_shape);
  });
  Dims local_shape;
  for (size_t d = static_cast<size_t>(prepend_axis_num); d < box.rank(); ++d) {
    local_shape.push_back(box.shape[d]);
  }
  if (box.shape != with_prepended(local_shape, prepend_axis_num)) {
    refuse(key, "box " + to_string(box) + " does not begin with " +
                    std::to_string(prepend_axis_num) + " prepended axes of size 1");
  }
  const std::string range = "flat_range [" + std::to_string(flat_range.begin) + ", " +
                            std::to_string(flat_range.end) + ")";
  if (flat_range.begin < 0 || flat_range.end < flat_range.begin ||
      flat_range.end > numel(local_shape)) {
    refuse(key, range + " is not within the local tensor of shape " + to_string(local_shape));
  }
  if (data.shape != Dims{flat_range.end - flat_range.begin}) {
    refuse(key, range + " requires 1-D data of the same length, but data has shape " +
                    to_string(data.shape));
  }
  ShardedTensor tensor;
  tensor.pieces = flat_pieces(data, local_shape, flat_range, {box, global_shape}, prepend_axis_num);
  tensor.key = std::move(key);
  tensor.data = std::move(data);
  tensor.global_shape = global_shape;
  tensor.box = box;
  tensor.replica_id = std::move(replica_id);
  tensor.prepend_axis_num = prepend_axis_num;
  tensor.flat_range = flat_range;
  return tensor;
}

ShardedTensor ShardedTensor::from_placements(std::string key, TensorView local,
                                             const Dims& global_shape, const Mesh& mesh,
                                             std::span<const Placement> placements, int rank) {
  check_common(key, local, {}, 0);
  with_key(key, [&] { return numel(global_shape); });
  ShardedTensor tensor;
  tensor.key = std::move(key);
  tensor.data = std::move(local);
  tensor.global_shape = global_shape;
  const auto coordinate = mesh.coordinate(rank);
  if (!coordinate) {
    tensor.box = {Dims(global_shape.size(), 0), Dims(global_shape.size(), 0)};
    return tensor;
  }
  // Uses the shape that the rank really holds: see held_boxes() for the case in which that matters.
  const LocalBoxes held = naming_rank(tensor.key, rank, [&] {
    return held_boxes(global_shape, mesh, *coordinate, placements, tensor.data.shape);
  });
  tensor.replica_id = tilestone::replica_id(mesh, *coordinate, placements);
  hold(tensor, held);
  tensor.holders = has_elements(global_shape) ? replica_holders(mesh, *coordinate, placements)
                                              : ascending(mesh.ranks());
  return tensor;
}

ShardedTensor ShardedTensor::from_param(std::string key, TensorView local, const Dims& param_shape,
                                        const Sharding& param, const Sharding& checkpoint,
                                        int rank) {
  check_common(key, local, {}, 0);
  MergedSharding merged = naming_rank(key, rank, [&] {
    return merge_shardings(local.shape, param_shape, param, checkpoint, rank);
  });
  ShardedTensor tensor;
  tensor.key = std::move(key);
  tensor.data = std::move(local);
  tensor.global_shape = std::move(merged.global_shape);
  tensor.replica_id = std::move(merged.replica_id);
  hold(tensor, merged.held);
  tensor.holders = std::move(merged.holders);
  return tensor;
}

ShardedTensor ShardedTensor::from_box(std::string key, TensorView data, const Dims& global_shape,
                                      const Box& box, ReplicaId replica_id,
                                      int64_t prepend_axis_num) {
  check_common(key, data, replica_id, prepend_axis_num);
  with_key(key, [&] {
    numel(global_shape);
    check_bounds(box, global_shape);
  });
  if (box.shape != with_prepended(data.shape, prepend_axis_num)) {
    refuse(key, "box " + to_string(box) + " does not match data's shape " + to_string(data.shape) +
                    " with " + std::to_string(prepend_axis_num) + " prepended axes of size 1");
  }
  ShardedTensor tensor;
  if (!has_elements(global_shape)) {
    tensor.pieces.push_back(whole_empty_piece(data.dtype, global_shape));
  } else if (!box.empty()) {
    tensor.pieces.push_back({box, data});
  }
  tensor.key = std::move(key);
  tensor.data = std::move(data);
  tensor.global_shape = global_shape;
  tensor.box = box;
  tensor.replica_id = std::move(replica_id);
  tensor.prepend_axis_num = prepend_axis_num;
  return tensor;
}

ShardedTensor ShardedTensor::from_pieces(std::string key, TensorView data, const Dims& global_shape,
                                         std::vector<Piece> pieces) {
  check_common(key, data, {}, 0);
  with_key(key, [&] { numel(global_shape); });
  ShardedTensor tensor;
  std::vector<Box> boxes;
  for (Piece& piece : pieces) {
    with_key(key, [&] { check_bounds(piece.box, global_shape); });
    if (piece.box.shape != piece.data.shape || piece.data.dtype != data.dtype) {
      refuse(key, "the tensor of box " + to_string(piece.box) + " is " +
                      std::string(to_string(piece.data.dtype)) + " of shape " +
                      to_string(piece.data.shape) + "; expected " +
                      std::string(to_string(data.dtype)) + " of shape " +
                      to_string(piece.box.shape));
    }
    if (piece.box.empty()) continue;
    boxes.push_back(piece.box);
    tensor.pieces.push_back(std::move(piece));
  }
  if (!has_elements(global_shape)) {
    tensor.pieces = {whole_empty_piece(data.dtype, global_shape)};
  }
  tensor.box = boxes.empty() ? Box{Dims(global_shape.size(), 0), Dims(global_shape.size(), 0)}
                             : bounding(boxes);
  tensor.key = std::move(key);
  tensor.data = std::move(data);
  tensor.global_shape = global_shape;
  return tensor;
}

ShardedTensor& ShardedTensor::declare_replicas(std::vector<int> ranks) & {
  std::sort(ranks.begin(), ranks.end());
  if (ranks.empty()) refuse(key, "the list of replica ranks is empty");
  if (ranks.front() < 0) {
    refuse(key, "replica rank " + std::to_string(ranks.front()) + " is negative");
  }
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  holders = std::move(ranks);
  return *this;
}

bool ShardedTensor::is_regular_grid() const {
  if (!flat_range && pieces.size() > 1) return false;
  for (size_t d = 0; d < box.rank(); ++d) {
    if (box.shape[d] != 0 && box.offset[d] % box.shape[d] != 0) return false;
  }
  return true;
}

ShardedObject ShardedObject::make(std::string key, Value data, Dims global_shape,
                                  Dims global_offset, ReplicaId replica_id) {
  const std::string offset = "global_offset " + to_string(global_offset);
  const std::string grid = "a grid of shape " + to_string(global_shape);
  if (global_offset.size() != global_shape.size()) {
    refuse(key, offset + " does not have as many dims as " + grid);
  }
  with_key(key, [&] { return numel(global_shape); });
  for (size_t d = 0; d < global_shape.size(); ++d) {
    if (global_offset[d] < 0 || global_offset[d] >= global_shape[d]) {
      refuse(key, offset + " is outside " + grid);
    }
  }
  for (int64_t id : replica_id) {
    if (id < 0) refuse(key, "replica_id " + to_string(replica_id) + " has a negative component");
  }
  return {std::move(key), std::move(data), std::move(global_shape), std::move(global_offset),
          std::move(replica_id)};
}

std::string ShardedObject::unique_key() const {
  const auto joined = [](const Dims& dims) {
    std::string text;
    for (size_t d = 0; d < dims.size(); ++d) {
      if (d > 0) text += '.';
      text += std::to_string(dims[d]);
    }
    return text;
  };
  return key + std::string(kShardInfix) + joined(global_offset) + "_" + joined(global_shape);
}

std::string_view grid_key(std::string_view unique_key) {
  const size_t at = unique_key.rfind(kShardInfix);
  if (at == std::string_view::npos) return unique_key;
  const std::string_view cell = unique_key.substr(at + kShardInfix.size());
  const size_t between = cell.find('_');
  const auto is_dims = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789.") == std::string_view::npos;
  };
  const bool is_cell = between != std::string_view::npos && is_dims(cell.substr(0, between)) &&
                       is_dims(cell.substr(between + 1));
  return is_cell ? unique_key.substr(0, at) : unique_key;
}

}  // namespace tilestone
