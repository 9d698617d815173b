#include "tilestone/geometry/placement.h"

#include <algorithm>
#include <optional>

#include "tilestone/base/error.h"

// How the boxes are computed. Placements are applied one mesh dim at a time, outer to inner, each
// to the result of the previous ones. So each tensor dim has an ordered list of runs [begin, end)
// of global indices: the i-th element of the local dim is the i-th element of the concatenated
// runs. A Shard keeps one contiguous part of that list. A StridedShard(d, s) keeps s parts of it:
// part number `index` of each of its s chunks. The boxes are the product of the runs of all dims.

namespace tilestone {
namespace {

struct Run {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};
using Runs = std::vector<Run>;

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

int64_t total(const Runs& runs) {
  int64_t sum = 0;
  for (const Run& run : runs) sum += run.size();
  return sum;
}

// Chunk `index` of the `count` chunks into which torch.chunk divides n elements: ceil(n / count)
// elements each, then one shorter chunk, then empty ones.
Run chunk(int64_t n, int64_t count, int64_t index) {
  const int64_t size = n / count + (n % count != 0 ? 1 : 0);
  if (size == 0 || index > n / size) return {n, n};
  const int64_t begin = index * size;
  return {begin, begin + std::min(size, n - begin)};
}

// A position in the concatenated runs that only moves forward.
class PlacementWalk {
 public:
  explicit PlacementWalk(const Runs& runs) : runs_(runs) {}

  // Appends the elements [part.begin, part.end) of the concatenated runs. Parts must come in
  // ascending order.
  void append(Run part, Runs& out) {
    while (part.begin < part.end) {
      while (part.begin >= before_ + runs_[at_].size()) before_ += runs_[at_++].size();
      const Run& run = runs_[at_];
      const int64_t begin = run.begin + (part.begin - before_);
      const int64_t end = std::min(run.end, run.begin + (part.end - before_));
      if (!out.empty() && out.back().end == begin) {
        out.back().end = end;
      } else {
        out.push_back({begin, end});
      }
      part.begin += end - begin;
    }
  }

 private:
  const Runs& runs_;
  size_t at_ = 0;
  int64_t before_ = 0;  // number of elements before runs_[at_]
};

// What the rank at coordinate `index` of a mesh dim of size `count` keeps of the runs if they are
// first split into `split` parts.
Runs shard_runs(const Runs& runs, int64_t split, int64_t count, int64_t index) {
  Runs kept;
  PlacementWalk walk(runs);
  const int64_t n = total(runs);
  for (int64_t s = 0; s < split; ++s) {
    const Run outer = chunk(n, split, s);
    if (outer.size() == 0) break;  // the rest are empty too; bounds the loop by the element count
    const Run inner = chunk(outer.size(), count, index);
    walk.append({outer.begin + inner.begin, outer.begin + inner.end}, kept);
  }
  return kept;
}

struct DimSplit {
  size_t dim = 0;
  int64_t split = 1;
};

size_t normal_dim(int64_t dim, size_t rank, const Placement& placement) {
  const auto dims = static_cast<int64_t>(rank);
  if (dim < -dims || dim >= dims) {
    fail("placement " + to_string(placement) + " names a dim that a tensor of " +
         std::to_string(rank) + " dims does not have");
  }
  return static_cast<size_t>(dim < 0 ? dim + dims : dim);
}

// The tensor dim that the placement splits, or nullopt for Replicate. Throws on Partial.
std::optional<DimSplit> split_of(const Placement& placement, size_t rank) {
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    return DimSplit{normal_dim(shard->dim, rank, placement), 1};
  }
  if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    if (strided->split < 1) fail("placement " + to_string(placement) + ": split must be positive");
    return DimSplit{normal_dim(strided->dim, rank, placement), strided->split};
  }
  if (std::holds_alternative<Partial>(placement)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "a tensor with a Partial placement is not reduced yet, so it has no value to save or load")
        .with_hint("redistribute it to Replicate or Shard first");
  }
  return std::nullopt;
}

void check_coordinate(const Mesh& mesh, const Dims& coordinate,
                      std::span<const Placement> placements) {
  if (placements.size() != mesh.dims()) {
    fail("expected one placement for each of the " + std::to_string(mesh.dims()) +
         " mesh dims, got " + std::to_string(placements.size()));
  }
  mesh.rank_at(coordinate);  // throws on a coordinate outside the mesh
}

bool is_replicate(const Placement& placement) {
  return std::holds_alternative<Replicate>(placement);
}

// Advances `at` to the next index of a grid of these sizes, in C order. Returns false when it wraps
// around to the start.
bool advance(Dims& at, const Dims& sizes) {
  for (size_t d = at.size(); d-- > 0;) {
    if (++at[d] < sizes[d]) return true;
    at[d] = 0;
  }
  return false;
}

// One empty box of the local tensor's shape. It begins at the first run of each dim, or at the
// dim's end if the dim has no runs, so it lies inside the tensor.
LocalBoxes nothing(const Dims& global_shape, const std::vector<Runs>& runs,
                   const Dims& local_shape) {
  Box box = Box::whole(local_shape);
  for (size_t d = 0; d < box.rank(); ++d) {
    box.offset[d] = runs[d].empty() ? global_shape[d] : runs[d].front().begin;
  }
  return {local_shape, {box}, {Box::whole(local_shape)}};
}

// The product of the runs of all dims, with the last dim varying fastest.
LocalBoxes product(const Dims& global_shape, const std::vector<Runs>& runs) {
  const size_t rank = global_shape.size();
  LocalBoxes result;
  result.local_shape = Dims(rank, 0);
  bool empty = false;
  for (size_t d = 0; d < rank; ++d) {
    result.local_shape[d] = total(runs[d]);
    empty = empty || runs[d].empty();
  }
  if (empty) return nothing(global_shape, runs, result.local_shape);
  Dims counts(rank, 0);
  for (size_t d = 0; d < rank; ++d) counts[d] = static_cast<int64_t>(runs[d].size());
  std::vector<std::vector<int64_t>> starts(rank);  // where each run begins in the local dim
  for (size_t d = 0; d < rank; ++d) {
    int64_t start = 0;
    for (const Run& run : runs[d]) {
      starts[d].push_back(start);
      start += run.size();
    }
  }
  Dims at(rank, 0);
  do {
    Box box{Dims(rank, 0), Dims(rank, 0)};
    Box local = box;
    for (size_t d = 0; d < rank; ++d) {
      const auto i = static_cast<size_t>(at[d]);
      box.offset[d] = runs[d][i].begin;
      box.shape[d] = runs[d][i].size();
      local.offset[d] = starts[d][i];
    }
    local.shape = box.shape;
    result.boxes.push_back(std::move(box));
    result.locals.push_back(std::move(local));
  } while (advance(at, counts));
  return result;
}

// A placement that splits tensor dim `dim` over mesh dim `mesh_dim`.
struct Split {
  size_t mesh_dim = 0;
  size_t dim = 0;
  int64_t split = 1;
  bool strided = false;
};

// The splits, outer to inner. Validates all arguments.
std::vector<Split> splits_of(const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
                             std::span<const Placement> placements) {
  numel(global_shape);  // throws on a negative dim
  check_coordinate(mesh, coordinate, placements);
  std::vector<Split> splits;
  for (size_t m = 0; m < placements.size(); ++m) {
    const auto split = split_of(placements[m], global_shape.size());
    if (!split) continue;
    const bool strided = std::holds_alternative<StridedShard>(placements[m]);
    splits.push_back({m, split->dim, split->split, strided});
  }
  return splits;
}

LocalBoxes apply(const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
                 std::span<const Split> splits) {
  std::vector<Runs> runs(global_shape.size());
  for (size_t d = 0; d < runs.size(); ++d) {
    if (global_shape[d] > 0) runs[d].push_back({0, global_shape[d]});
  }
  for (const Split& s : splits) {
    runs[s.dim] =
        shard_runs(runs[s.dim], s.split, mesh.shape()[s.mesh_dim], coordinate[s.mesh_dim]);
  }
  return product(global_shape, runs);
}

bool fits(const LocalBoxes& held, const Dims& local_shape) {
  return held.local_shape == local_shape ||
         (numel(held.local_shape) == 0 && numel(local_shape) == 0);
}

// The order in which FSDP2 over tensor parallelism splits: each StridedShard comes after the splits
// of its tensor dim further right, as a plain Shard. nullopt if no placement is strided, or if a
// StridedShard's split is not the number of parts made further right.
std::optional<std::vector<Split>> inner_splits_first(const Mesh& mesh,
                                                     std::span<const Split> splits, size_t rank) {
  bool any = false;
  std::vector<Split> order;
  Dims parts(rank, 1);  // number of parts that the splits further right cut each tensor dim into
  for (size_t i = splits.size(); i-- > 0;) {
    Split split = splits[i];
    if (split.strided) {
      if (split.split != parts[split.dim]) return std::nullopt;
      split.split = 1;
      any = true;
      order.push_back(split);
    } else {
      order.insert(order.begin(), split);
    }
    parts[split.dim] *= mesh.shape()[split.mesh_dim];
  }
  if (!any) return std::nullopt;
  return order;
}

}  // namespace

std::string to_string(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    return "Shard(" + std::to_string(shard->dim) + ")";
  }
  if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    return "StridedShard(" + std::to_string(strided->dim) + ", " + std::to_string(strided->split) +
           ")";
  }
  return is_replicate(placement) ? "Replicate()" : "Partial()";
}

LocalBoxes local_boxes(const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
                       std::span<const Placement> placements) {
  const std::vector<Split> splits = splits_of(global_shape, mesh, coordinate, placements);
  return apply(global_shape, mesh, coordinate, splits);
}

LocalBoxes held_boxes(const Dims& global_shape, const Mesh& mesh, const Dims& coordinate,
                      std::span<const Placement> placements, const Dims& local_shape) {
  const std::vector<Split> splits = splits_of(global_shape, mesh, coordinate, placements);
  LocalBoxes held = apply(global_shape, mesh, coordinate, splits);
  const bool held_fits = fits(held, local_shape);
  const auto inner_first = inner_splits_first(mesh, splits, global_shape.size());
  if (inner_first) {
    LocalBoxes other = apply(global_shape, mesh, coordinate, *inner_first);
    const bool other_fits = fits(other, local_shape);
    if (held_fits && other_fits && numel(local_shape) > 0 && other.boxes != held.boxes) {
      throw Error(ErrorCode::kUnsupported,
                  "a StridedShard splits a tensor of shape " + to_string(global_shape) +
                      " unevenly: a local tensor of shape " + to_string(local_shape) +
                      " may hold " + to_string(held.boxes.front()) + " or " +
                      to_string(other.boxes.front()))
          .with_hint(
              "make the dim divisible by the mesh dims that split it, or redistribute the tensor");
    }
    if (!held_fits && other_fits) return other;
  }
  if (!held_fits) {
    fail("the local tensor has shape " + to_string(local_shape) + ", but the placements of a " +
         to_string(global_shape) + " tensor give " + to_string(held.local_shape));
  }
  return held;
}

Dims replica_id(const Mesh& mesh, const Dims& coordinate, std::span<const Placement> placements) {
  check_coordinate(mesh, coordinate, placements);
  Dims id;
  for (size_t m = 0; m < placements.size(); ++m) {
    if (is_replicate(placements[m])) id.push_back(coordinate[m]);
  }
  return id;
}

std::vector<int> replica_holders(const Mesh& mesh, const Dims& coordinate,
                                 std::span<const Placement> placements) {
  check_coordinate(mesh, coordinate, placements);
  Dims first = coordinate;
  Dims counts(mesh.dims(), 1);
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!is_replicate(placements[m])) continue;
    first[m] = 0;
    counts[m] = mesh.shape()[m];
  }
  std::vector<int> holders;
  Dims step(mesh.dims(), 0);
  do {
    Dims at = first;
    for (size_t m = 0; m < at.size(); ++m) at[m] += step[m];
    holders.push_back(mesh.rank_at(at));
  } while (advance(step, counts));
  std::sort(holders.begin(), holders.end());
  return holders;
}

}  // namespace tilestone
