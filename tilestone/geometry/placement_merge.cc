#include <algorithm>
#include <limits>
#include <optional>

#include "tilestone/base/checked.h"
#include "tilestone/base/error.h"
#include "tilestone/geometry/placement.h"

// How ranks are distinguished. First an example: the weights of experts on 4 ranks. The
// checkpoint's mesh has the dims edp and ep and the ranks [[0, 1], [2, 3]]; its placements are
// (Replicate, Shard(0)), because ep divides the experts. On rank 0 the parameter has only the
// experts of its ep coordinate. FSDP2 shards it over edp: its mesh is [0, 2], its placement
// Shard(0). Rank 1, the next along ep, is not in that mesh: it has a parameter of its own, with
// other experts. Rank 2, the next along edp, has another shard of the same parameter. So the Shard
// over ep is outer: it divides the tensor first, and the parameter's Shard divides one of its
// parts.
//
// In general, let m be a mesh dim of the checkpoint, and let its line be the ranks that differ from
// this rank only in coordinate m (in the example, ranks 0 and 1 for ep). If, along the line, the
// parameter's coordinates vary in a dim that it splits, the parameter treats these ranks as
// different shards (ranks 0 and 2). Otherwise it treats them as replicas, or does not know them; a
// Shard over such a line is outer. Each coordinate along the outer dims has a parameter of its own,
// which is one shard of the checkpoint's tensor. So at this rank's outer coordinates, the rest of
// the checkpoint's mesh contains copies of one parameter, and the rest of the parameter's mesh is
// one copy.

namespace tilestone {
namespace {

[[noreturn]] void fail_merging(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, "merging placements: " + message);
}

// The tensor dim that a placement splits, counted from the front, or nullopt for Replicate.
std::optional<size_t> shard_dim(const Placement& placement, size_t rank) {
  int64_t dim = 0;
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    dim = shard->dim;
  } else if (const auto* strided = std::get_if<StridedShard>(&placement)) {
    dim = strided->dim;
  } else {
    return std::nullopt;
  }
  const auto dims = static_cast<int64_t>(rank);
  if (dim < -dims || dim >= dims) {
    fail_merging(to_string(placement) + " names a dim that a tensor of " + std::to_string(rank) +
                 " dims does not have");
  }
  return static_cast<size_t>(dim < 0 ? dim + dims : dim);
}

// A sharding as seen by one of its ranks.
struct Side {
  const Mesh& mesh;
  std::span<const Placement> placements;
  std::string whose;                          // "parameter", "checkpoint"
  Dims at;                                    // the rank's coordinate
  std::vector<std::optional<size_t>> splits;  // the tensor dim that each mesh dim splits, if any

  Side(const Sharding& sharding, std::string name, int rank, size_t tensor_dims)
      : mesh(sharding.mesh), placements(sharding.placements), whose(std::move(name)) {
    if (placements.size() != mesh.dims()) {
      fail_merging("expected one placement for each of the " + std::to_string(mesh.dims()) +
                   " mesh dims of the " + whose + ", got " + std::to_string(placements.size()));
    }
    const auto found = mesh.coordinate(rank);
    if (!found)
      fail_merging("rank " + std::to_string(rank) + " is not in the " + whose + "'s mesh");
    at = *found;
    for (const Placement& placement : placements) {
      splits.push_back(shard_dim(placement, tensor_dims));
    }
  }

  int64_t size(size_t m) const { return mesh.shape()[m]; }

  // The rank at index `index` of the line along mesh dim m.
  int on_line(size_t m, int64_t index) const {
    Dims there = at;
    there[m] = index;
    return mesh.rank_at(there);
  }

  std::string name(size_t m) const {
    const bool named = !mesh.names().empty();
    return "mesh dim " + (named ? "'" + mesh.names()[m] + "'" : std::to_string(m)) + " of the " +
           whose;
  }
};

void insert(std::vector<size_t>& set, size_t item) {
  if (std::find(set.begin(), set.end(), item) == set.end()) set.push_back(item);
}

class Merge {
 public:
  Merge(const Side& param, const Side& checkpoint) : param_(param), checkpoint_(checkpoint) {
    for (size_t m = 0; m < checkpoint_.mesh.dims(); ++m) outer_.push_back(is_outer(m));
    for (size_t i = 0; i < param_.mesh.dims(); ++i) kept_.push_back(kept_coordinates(i));
    look_at_copies();
  }

  bool outer(size_t m) const { return outer_[m]; }
  Dims replica_id() const;
  std::vector<int> holders() const;

 private:
  bool is_outer(size_t m) const;
  std::vector<int64_t> kept_coordinates(size_t i) const;
  void look_at_copies();
  std::vector<std::vector<int64_t>> same_shard() const;
  bool is_copy(int rank) const;
  std::optional<std::vector<size_t>> dims_between_copies() const;
  bool same_along(const Dims& coordinate, const std::vector<size_t>& dims) const;
  bool in_outer_shard(const Dims& coordinate) const;

  const Side& param_;
  const Side& checkpoint_;
  std::vector<bool> outer_;  // for each mesh dim of the checkpoint
  // For each mesh dim of the parameter, the indices along it that are in this rank's outer shard,
  // ascending.
  std::vector<std::vector<int64_t>> kept_;
  int64_t copy_ = 0;           // number of this rank's copy of the parameter in its outer shard
  std::vector<Dims> in_both_;  // checkpoint coordinates of this copy's ranks, where they have one
};

// Whether the checkpoint's Shard over mesh dim m lies outside the parameter's sharding.
bool Merge::is_outer(size_t m) const {
  const auto dim = checkpoint_.splits[m];
  if (!dim) return false;
  bool all_known = true;
  std::vector<size_t> varying;  // mesh dims of the parameter
  for (int64_t k = 0; k < checkpoint_.size(m); ++k) {
    const auto there = param_.mesh.coordinate(checkpoint_.on_line(m, k));
    all_known = all_known && there;
    for (size_t i = 0; there && i < there->size(); ++i) {
      if ((*there)[i] != param_.at[i]) insert(varying, i);
    }
  }
  const auto is_split = [&](size_t i) { return param_.splits[i].has_value(); };
  if (std::none_of(varying.begin(), varying.end(), is_split)) return true;
  const auto other = std::find_if(varying.begin(), varying.end(),
                                  [&](size_t i) { return param_.splits[i] != dim; });
  if (all_known && other == varying.end()) return false;
  const size_t i = other == varying.end() ? varying.front() : *other;
  fail_merging(checkpoint_.name(m) + " is " + to_string(checkpoint_.placements[m]) +
               ", but over the same ranks " + param_.name(i) + " is " +
               to_string(param_.placements[i]) +
               (all_known ? "" : ", and the parameter's mesh has only some of these ranks"));
}

bool Merge::same_along(const Dims& coordinate, const std::vector<size_t>& dims) const {
  return std::all_of(dims.begin(), dims.end(),
                     [&](size_t m) { return coordinate[m] == checkpoint_.at[m]; });
}

bool Merge::in_outer_shard(const Dims& coordinate) const {
  for (size_t m = 0; m < outer_.size(); ++m) {
    if (outer_[m] && coordinate[m] != checkpoint_.at[m]) return false;
  }
  return true;
}

std::vector<int64_t> Merge::kept_coordinates(size_t i) const {
  std::vector<int64_t> kept;
  bool all_known = true;
  for (int64_t k = 0; k < param_.size(i); ++k) {
    const auto there = checkpoint_.mesh.coordinate(param_.on_line(i, k));
    all_known = all_known && there;
    if (!there || in_outer_shard(*there)) kept.push_back(k);
  }
  if (static_cast<int64_t>(kept.size()) == param_.size(i)) return kept;
  if (!param_.splits[i] && all_known) return kept;
  fail_merging(param_.name(i) + ", which is " + to_string(param_.placements[i]) +
               ", has ranks of another shard of the checkpoint" +
               (all_known ? "" : ", and ranks that are not in the checkpoint's mesh"));
}

// Calls visit(coordinate) for each coordinate in the product of the lists, with the last dim
// varying fastest.
template <typename Visit>
void for_each_in(const std::vector<std::vector<int64_t>>& coordinates, Visit&& visit) {
  std::vector<size_t> at(coordinates.size(), 0);
  Dims coordinate;
  for (const auto& along : coordinates) coordinate.push_back(along.front());
  while (true) {
    visit(coordinate);
    size_t d = coordinates.size();
    while (d > 0 && at[d - 1] + 1 == coordinates[d - 1].size()) {
      --d;
      at[d] = 0;
      coordinate[d] = coordinates[d].front();
    }
    if (d == 0) return;
    coordinate[d - 1] = coordinates[d - 1][++at[d - 1]];
  }
}

// A copy's number is the lowest number that one of its ranks has in the checkpoint's mesh without
// the outer dims.
void Merge::look_at_copies() {
  int64_t first = std::numeric_limits<int64_t>::max();
  for_each_in(kept_, [&](const Dims& coordinate) {
    const auto there = checkpoint_.mesh.coordinate(param_.mesh.rank_at(coordinate));
    if (!there || !in_outer_shard(*there)) return;
    int64_t number = 0;
    for (size_t m = 0; m < there->size(); ++m) {
      if (!outer_[m]) number = number * checkpoint_.size(m) + (*there)[m];
    }
    first = std::min(first, number);
    in_both_.push_back(*there);
  });
  copy_ = first;
}

Dims Merge::replica_id() const {
  Dims id{copy_};
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (param_.splits[i]) continue;
    const auto mine = std::find(kept_[i].begin(), kept_[i].end(), param_.at[i]);
    id.push_back(mine - kept_[i].begin());
  }
  return id;
}

// For each mesh dim of the parameter, the indices that hold the same elements as this rank.
std::vector<std::vector<int64_t>> Merge::same_shard() const {
  std::vector<std::vector<int64_t>> coordinates = kept_;
  for (size_t i = 0; i < coordinates.size(); ++i) {
    if (param_.splits[i]) coordinates[i] = {param_.at[i]};
  }
  return coordinates;
}

// Whether a rank belongs to the same copy of the parameter as this rank.
bool Merge::is_copy(int rank) const {
  const auto there = param_.mesh.coordinate(rank);
  if (!there) return false;
  for (size_t i = 0; i < kept_.size(); ++i) {
    if (!std::binary_search(kept_[i].begin(), kept_[i].end(), (*there)[i])) return false;
  }
  return true;
}

// The mesh dims of the checkpoint along which other copies lie. nullopt if this can't be
// determined, because a dim crosses the parameter's mesh without lying inside it.
std::optional<std::vector<size_t>> Merge::dims_between_copies() const {
  std::vector<size_t> between;
  for (size_t m = 0; m < outer_.size(); ++m) {
    if (outer_[m] || checkpoint_.size(m) == 1) continue;
    int64_t inside = 0;
    for (int64_t k = 0; k < checkpoint_.size(m); ++k) {
      if (is_copy(checkpoint_.on_line(m, k))) ++inside;
    }
    if (inside == checkpoint_.size(m)) continue;
    if (inside != 1) return std::nullopt;
    between.push_back(m);
  }
  const auto here = [&](const Dims& coordinate) { return same_along(coordinate, between); };
  if (!std::all_of(in_both_.begin(), in_both_.end(), here)) return std::nullopt;
  return between;
}

std::vector<int> Merge::holders() const {
  const auto between = dims_between_copies();
  if (!between) return {};
  std::vector<int> ranks;
  bool known = true;
  for_each_in(same_shard(), [&](const Dims& own) {
    const int holder = param_.mesh.rank_at(own);
    if (between->empty()) {
      ranks.push_back(holder);
      return;
    }
    const auto there = checkpoint_.mesh.coordinate(holder);
    known = known && there;
    if (!there) return;
    std::vector<std::vector<int64_t>> coordinates;
    for (int64_t index : *there) coordinates.push_back({index});
    for (size_t m : *between) {
      coordinates[m].clear();
      for (int64_t k = 0; k < checkpoint_.size(m); ++k) coordinates[m].push_back(k);
    }
    for_each_in(coordinates,
                [&](const Dims& at) { ranks.push_back(checkpoint_.mesh.rank_at(at)); });
  });
  if (!known) return {};
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void check_rules(std::span<const Placement> placements) {
  for (const Placement& placement : placements) {
    if (std::holds_alternative<Shard>(placement) || std::holds_alternative<Replicate>(placement)) {
      continue;
    }
    fail_merging("a checkpoint placement must be Shard or Replicate, not " + to_string(placement));
  }
}

// The holders of a tensor without elements: all ranks of the checkpoint's mesh. Empty if that mesh
// lacks a rank of the parameter's mesh, because then not every rank knows all of them.
std::vector<int> all_of(const Side& param, const Side& checkpoint) {
  for (int rank : param.mesh.ranks()) {
    if (!checkpoint.mesh.coordinate(rank)) return {};
  }
  std::vector<int> ranks = checkpoint.mesh.ranks();
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// Moves the parameter's boxes, which lie in a tensor of merged.global_shape, to shard ranks[d] of
// fragments[d] along each dim d, and enlarges the global shape to match.
void scale(MergedSharding& merged, const Dims& ranks, const Dims& fragments) {
  for (size_t d = 0; d < ranks.size(); ++d) {
    const int64_t shard = merged.global_shape[d];
    merged.global_shape[d] = checked_mul(shard, fragments[d], "merged global shape");
    for (Box& box : merged.held.boxes) box.offset[d] += ranks[d] * shard;
  }
}

}  // namespace

MergedSharding merge_shardings(const Dims& param_local_shape, const Dims& param_global_shape,
                               const Sharding& param, const Sharding& checkpoint, int rank) {
  const size_t dims = param_global_shape.size();
  check_rules(checkpoint.placements);
  const Side own(param, "parameter", rank, dims);
  const Side rules(checkpoint, "checkpoint", rank, dims);
  MergedSharding merged;
  merged.global_shape = param_global_shape;
  merged.held =
      held_boxes(param_global_shape, param.mesh, own.at, param.placements, param_local_shape);
  const Merge merge(own, rules);
  Dims ranks(dims, 0);
  Dims fragments(dims, 1);
  for (size_t m = 0; m < checkpoint.mesh.dims(); ++m) {
    if (!merge.outer(m)) continue;
    const size_t d = *rules.splits[m];
    ranks[d] = ranks[d] * rules.size(m) + rules.at[m];
    fragments[d] = checked_mul(fragments[d], rules.size(m), "fragments");
  }
  scale(merged, ranks, fragments);
  merged.strides = contiguous_strides(merged.global_shape);
  merged.replica_id = merge.replica_id();
  merged.holders = numel(merged.global_shape) > 0 ? merge.holders() : all_of(own, rules);
  return merged;
}

}  // namespace tilestone
