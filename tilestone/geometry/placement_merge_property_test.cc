// Compares merge_shardings with a model of all ranks. The model finds every rank's part by cutting
// one tensor directly, and the test checks all ranks together.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "tilestone/geometry/placement.h"

namespace tilestone::placement_merge_property_test {

// The role of one dim of the grid of all ranks (the world) for the tensor.
enum class Role {
  kOther,         // separates different tensors; in neither mesh
  kOuter,         // the checkpoint shards; the parameter does not know these ranks
  kOuterReplica,  // the checkpoint shards; the parameter treats these ranks as replicas
  kOwn,           // the parameter shards; the checkpoint does not know these ranks
  kOwnReplicate,  // the parameter shards; the checkpoint says Replicate
  kOwnShard,      // both shard; this counts once
  kCopyOfParam,   // replicas in the parameter's mesh only
  kCopy,          // replicas in the checkpoint's mesh only
  kCopyOfBoth,
};

bool in_param(Role role) {
  return role != Role::kOther && role != Role::kOuter && role != Role::kCopy;
}
bool in_checkpoint(Role role) {
  return role != Role::kOther && role != Role::kOwn && role != Role::kCopyOfParam;
}
bool own(Role role) {
  return role == Role::kOwn || role == Role::kOwnReplicate || role == Role::kOwnShard;
}
bool outer(Role role) { return role == Role::kOuter || role == Role::kOuterReplica; }

struct Axis {
  int64_t size = 1;
  Role role = Role::kOther;
  int64_t dim = 0;  // the tensor dim, if the role shards
};

// A test case: the world's grid in C order, and how meshes are made of its dims.
struct Case {
  std::vector<Axis> world;
  std::vector<size_t> checkpoint_order;         // dims of the world in the checkpoint's mesh
  std::vector<std::vector<size_t>> param_dims;  // each mesh dim of the parameter: flattened dims
  Dims param_shape;

  Mesh grid() const {
    Dims sizes;
    for (const Axis& axis : world) sizes.push_back(axis.size);
    return Mesh::grid(sizes);
  }

  // The ranks that differ from `rank` only in these dims of the world, flattened in this order.
  Mesh mesh_through(int rank, const std::vector<std::vector<size_t>>& dims) const {
    const Mesh all = grid();
    Dims shape;
    std::vector<size_t> order;
    for (const auto& flattened : dims) {
      int64_t size = 1;
      for (size_t w : flattened) size *= world[w].size;
      for (size_t w : flattened) order.push_back(w);
      shape.push_back(size);
    }
    std::vector<int> ranks;
    Dims at = *all.coordinate(rank);
    for (size_t w : order) at[w] = 0;
    while (true) {
      ranks.push_back(all.rank_at(at));
      size_t k = order.size();
      while (k > 0 && ++at[order[k - 1]] == world[order[k - 1]].size) at[order[--k]] = 0;
      if (k == 0) return Mesh(shape, ranks);
    }
  }

  Sharding param(int rank) const {
    Sharding sharding{mesh_through(rank, param_dims), {}};
    for (const auto& flattened : param_dims) {
      const Axis& axis = world[flattened.front()];
      sharding.placements.push_back(own(axis.role) ? Placement(Shard{axis.dim}) : Replicate{});
    }
    return sharding;
  }

  Sharding checkpoint(int rank) const {
    std::vector<std::vector<size_t>> dims;
    std::vector<Placement> placements;
    for (size_t w : checkpoint_order) {
      dims.push_back({w});
      const bool shards = outer(world[w].role) || world[w].role == Role::kOwnShard;
      placements.push_back(shards ? Placement(Shard{world[w].dim}) : Replicate{});
    }
    return {mesh_through(rank, dims), placements};
  }
};

using Element = Dims;

// The elements that a rank holds, found by cutting.
std::set<Element> cut(const Case& c, int rank) {
  const Dims at = *c.grid().coordinate(rank);
  std::vector<std::vector<int64_t>> along(c.param_shape.size());
  for (size_t d = 0; d < along.size(); ++d) {
    int64_t shard = 0;
    for (size_t w : c.checkpoint_order) {
      const Axis& axis = c.world[w];
      if (outer(axis.role) && axis.dim == static_cast<int64_t>(d)) {
        shard = shard * axis.size + at[w];
      }
    }
    for (int64_t i = 0; i < c.param_shape[d]; ++i) along[d].push_back(shard * c.param_shape[d] + i);
  }
  for (const auto& flattened : c.param_dims) {
    const Axis& axis = c.world[flattened.front()];
    if (!own(axis.role)) continue;
    int64_t count = 1;
    int64_t index = 0;
    for (size_t w : flattened) {
      count *= c.world[w].size;
      index = index * c.world[w].size + at[w];
    }
    auto& indices = along[static_cast<size_t>(axis.dim)];
    const auto n = static_cast<int64_t>(indices.size());
    const int64_t size = (n + count - 1) / count;
    const int64_t begin = std::min(n, index * size);
    indices = {indices.begin() + begin, indices.begin() + std::min(n, begin + size)};
  }
  std::set<Element> elements{{}};
  for (const auto& indices : along) {
    std::set<Element> longer;
    for (const Element& e : elements) {
      for (int64_t i : indices) {
        longer.insert(e);
        Element next = e;
        next.push_back(i);
        longer.erase(e);
        longer.insert(next);
      }
    }
    elements = longer;
  }
  return elements;
}

std::set<Element> elements_of(const std::vector<Box>& boxes) {
  std::set<Element> elements;
  for (const Box& box : boxes) {
    if (box.empty()) continue;
    Element at = box.offset;
    while (true) {
      EXPECT_TRUE(elements.insert(at).second);
      size_t d = at.size();
      while (d > 0 && ++at[d - 1] == box.end(d - 1)) {
        --d;
        at[d] = box.offset[d];
      }
      if (d == 0) break;
    }
  }
  return elements;
}

class Random {
 public:
  explicit Random(uint64_t seed) : rng_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(rng_() % static_cast<uint64_t>(n)); }

  Case a_case() {
    Case c;
    const int64_t rank = 1 + below(2);
    for (int64_t d = 0; d < rank; ++d) c.param_shape.push_back(1 + below(5));
    const int64_t dims = 1 + below(4);
    for (int64_t w = 0; w < dims; ++w) {
      c.world.push_back({1 + below(3), static_cast<Role>(below(9)), below(rank)});
    }
    for (size_t w = 0; w < c.world.size(); ++w) {
      if (in_checkpoint(c.world[w].role)) c.checkpoint_order.push_back(w);
      if (in_param(c.world[w].role)) add_to_param(c, w);
    }
    std::shuffle(c.checkpoint_order.begin(), c.checkpoint_order.end(), rng_);
    return c;
  }

 private:
  // Either a separate mesh dim, or flattened into the previous one.
  void add_to_param(Case& c, size_t w) {
    const auto alike = [&](const Axis& a, const Axis& b) {
      const bool both_split = own(a.role) && own(b.role) && a.dim == b.dim;
      // The checkpoint knows either all ranks of a flattened dim or none.
      const bool same_side = in_checkpoint(a.role) == in_checkpoint(b.role);
      return same_side && (both_split || (!own(a.role) && !own(b.role)));
    };
    if (!c.param_dims.empty() && below(2) == 0 &&
        alike(c.world[c.param_dims.back().front()], c.world[w])) {
      c.param_dims.back().push_back(w);
    } else {
      c.param_dims.push_back({w});
    }
  }

  std::mt19937_64 rng_;
};

struct Held {
  std::set<int> ranks;
  int mains = 0;
};

// One tensor of the world: the ranks at one coordinate along the kOther dims.
void check(const Case& c, const std::vector<int>& ranks, int64_t& known) {
  std::map<std::set<Element>, Held> shards;
  std::map<int, MergedSharding> merged;
  Dims global_shape = c.param_shape;
  for (const Axis& axis : c.world) {
    if (outer(axis.role)) global_shape[static_cast<size_t>(axis.dim)] *= axis.size;
  }
  for (int rank : ranks) {
    const Sharding param = c.param(rank);
    const Dims local =
        local_boxes(c.param_shape, param.mesh, *param.mesh.coordinate(rank), param.placements)
            .local_shape;
    const auto m = merge_shardings(local, c.param_shape, param, c.checkpoint(rank), rank);
    ASSERT_EQ(m.global_shape, global_shape);
    const std::set<Element> elements = cut(c, rank);
    ASSERT_EQ(elements_of(m.held.boxes), elements) << "rank " << rank;
    Held& shard = shards[elements];
    shard.ranks.insert(rank);
    if (m.replica_id == Dims(m.replica_id.size(), 0)) ++shard.mains;
    merged.emplace(rank, m);
  }
  int64_t covered = 0;
  for (const auto& [elements, shard] : shards) {
    if (elements.empty()) continue;  // these ranks belong to several empty shards
    covered += static_cast<int64_t>(elements.size());
    ASSERT_EQ(shard.mains, 1);
    for (int rank : shard.ranks) {
      const std::vector<int>& holders = merged.at(rank).holders;
      if (holders.empty()) continue;
      ++known;
      ASSERT_EQ(std::set<int>(holders.begin(), holders.end()), shard.ranks) << "rank " << rank;
    }
  }
  ASSERT_EQ(covered, numel(global_shape));
}

TEST(PlacementMergeProperty, EveryElementHasOneMainReplicaAndHoldersAreWhoHoldsTheSame) {
  Random random(20261123);
  int64_t known = 0;
  int64_t all = 0;
  for (int i = 0; i < 3000; ++i) {
    const Case c = random.a_case();
    std::map<Dims, std::vector<int>> tensors;
    const Mesh grid = c.grid();
    for (int rank : grid.ranks()) {
      Dims other;
      const Dims at = *grid.coordinate(rank);
      for (size_t w = 0; w < at.size(); ++w) {
        if (c.world[w].role == Role::kOther) other.push_back(at[w]);
      }
      tensors[other].push_back(rank);
    }
    std::string text = "case " + std::to_string(i) + ":";
    for (const Axis& axis : c.world) {
      text += " " + std::to_string(axis.size) + " role " +
              std::to_string(static_cast<int>(axis.role)) + " dim " + std::to_string(axis.dim);
    }
    for (const auto& [other, ranks] : tensors) {
      SCOPED_TRACE(text);
      ASSERT_NO_FATAL_FAILURE(check(c, ranks, known));
      all += static_cast<int64_t>(ranks.size());
    }
  }
  EXPECT_GT(known, all / 2);  // holders are usually known, so they really are compared
}

}  // namespace tilestone::placement_merge_property_test
