// Assigning by exchange, in steps: every rank's plan is folded into the distinct chunks of each
// tensor (add); the whole is checked; the chunks that name their holders are shared out as each
// holder does by rule; those that one rank lists go to it; the others, largest first, go to their
// least-loaded lister. The rank's own lists of chunks then say which of them it owns.
#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "tilestone/plan/balance_internal.h"
#include "tilestone/plan/planner_internal.h"

namespace tilestone {

using planner::Chunk;
using planner::kNone;
using planner::Tensor;

namespace {

// One of a rank's chunks: which of the distinct ones it is. Empty boxes have no chunk.
struct Listing {
  uint32_t tensor = kNone;
  uint32_t chunk = kNone;
};

struct Object {
  bool common = false;
  uint32_t first_rank = kNone;
  uint32_t writer = kNone;  // the lowest rank for common ones, else the main replica
  uint32_t index = 0;       // in the writer's plan
};

std::string rank_text(uint32_t rank) { return "rank " + std::to_string(rank); }

std::string described(DType dtype, const Dims& shape) {
  return std::string(to_string(dtype)) + " " + to_string(shape);
}

bool has_dims_of(const Box& box, const Dims& shape) {
  return box.offset.size() == shape.size() && box.shape.size() == shape.size();
}

}  // namespace

struct SavePlanner::State {
  explicit State(int world) : listings(static_cast<size_t>(world)), added(listings.size(), false) {}

  void add_tensors(uint32_t rank, const LocalSavePlan& plan);
  void add_sets(const LocalSavePlan& plan);
  void add_chunks(uint32_t rank, const LocalSavePlan& plan);
  void add_chunk(uint32_t rank, const PlanChunk& listed, uint32_t index, Listing& listing);
  void add_objects(uint32_t rank, const LocalSavePlan& plan);
  void note(ErrorCode code, std::string problem, const std::string& key);

  void validate() const;
  bool is_by_rule(const Chunk& chunk) const;
  void assign_by_rule();
  void assign_single();
  void assign_shared();
  std::vector<Assignment> result() const;

  std::vector<Tensor> tensors;
  std::unordered_map<std::string, uint32_t> tensor_ids;
  std::vector<std::vector<Listing>> listings;  // by rank, in the order of its chunks
  std::vector<bool> added;
  std::map<std::vector<int>, uint32_t> set_ids;
  std::vector<const std::vector<int>*> sets;  // keys of set_ids
  std::unordered_map<std::string, Object> objects;
  std::optional<Error> first_problem;
  std::vector<uint64_t> load;  // bytes, by rank

  // Of the rank that is being added, by its own indices; and, as a guess, of the one before.
  std::vector<uint32_t> local_tensors;
  std::vector<uint32_t> local_sets;
};

void SavePlanner::State::note(ErrorCode code, std::string problem, const std::string& key) {
  if (!first_problem) first_problem = Error(code, std::move(problem)).with_key(key);
}

void SavePlanner::State::add_tensors(uint32_t rank, const LocalSavePlan& plan) {
  local_tensors.resize(plan.tensors.size(), kNone);
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const PlanTensor& tensor = plan.tensors[i];
    uint32_t& id = local_tensors[i];  // most ranks list the tensors that the rank before listed
    if (id == kNone || tensors[id].key() != tensor.key) {
      const auto next = static_cast<uint32_t>(tensors.size());
      const auto [known, is_new] = tensor_ids.emplace(tensor.key, next);
      id = known->second;
      if (is_new) tensors.emplace_back(tensor.key, tensor.dtype, tensor.global_shape, rank);
      const auto object = objects.find(tensor.key);
      if (is_new && object != objects.end()) {
        note(ErrorCode::kMismatch,
             rank_text(rank) + " has a tensor under the key of an object of " +
                 rank_text(object->second.first_rank),
             tensor.key);
      }
    }
    const Tensor& other = tensors[id];
    if (other.dtype() != tensor.dtype || other.shape() != tensor.global_shape) {
      note(ErrorCode::kMismatch,
           "two ranks disagree on a tensor: " + rank_text(other.first_rank()) + " has " +
               described(other.dtype(), other.shape()) + ", " + rank_text(rank) + " has " +
               described(tensor.dtype, tensor.global_shape),
           tensor.key);
    }
  }
}

void SavePlanner::State::add_sets(const LocalSavePlan& plan) {
  local_sets.clear();
  for (const std::vector<int>& set : plan.holder_sets) {
    const auto next = static_cast<uint32_t>(sets.size());
    const auto [known, is_new] = set_ids.emplace(set, next);
    if (is_new) sets.push_back(&known->first);
    local_sets.push_back(known->second);
  }
}

void SavePlanner::State::add_chunk(uint32_t rank, const PlanChunk& listed, uint32_t index,
                                   Listing& listing) {
  listing.tensor = local_tensors.at(listed.tensor);
  Tensor& tensor = tensors[listing.tensor];
  if (!has_dims_of(listed.box, tensor.shape())) {
    note(ErrorCode::kMismatch,
         rank_text(rank) + " holds box " + to_string(listed.box) + " of a tensor of shape " +
             to_string(tensor.shape()),
         tensor.key());
    return;
  }
  if (listed.box.empty()) {
    if (tensor.has_elements() || tensor.empty_rank <= rank) return;
    tensor.empty_rank = rank;
    tensor.empty_chunk = index;
    return;
  }
  listing.chunk = tensor.find_or_add(listed.box);
  Chunk& chunk = tensor.chunk(listing.chunk);
  uint32_t holders = PlanChunk::kUnknown;
  if (listed.holders != PlanChunk::kUnknown) {
    holders = local_sets.at(listed.holders);
    const std::vector<int>& set = *sets[holders];
    const bool inside = std::binary_search(set.begin(), set.end(), static_cast<int>(rank));
    if (!inside) holders = PlanChunk::kUnknown;
  }
  if (chunk.listers == 0) {
    chunk.first_rank = rank;
    chunk.holders = holders;
  } else if (chunk.holders != holders) {
    chunk.holders = PlanChunk::kUnknown;
  }
  if (chunk.last_rank == rank) {
    note(ErrorCode::kInvalidArgument,
         rank_text(rank) + " lists box " + to_string(listed.box) + " twice", tensor.key());
  }
  chunk.last_rank = rank;
  ++chunk.listers;
}

void SavePlanner::State::add_chunks(uint32_t rank, const LocalSavePlan& plan) {
  std::vector<Listing>& mine = listings[rank];
  mine.resize(plan.chunks.size());
  for (uint32_t i = 0; i < plan.chunks.size(); ++i) add_chunk(rank, plan.chunks[i], i, mine[i]);
}

void SavePlanner::State::add_objects(uint32_t rank, const LocalSavePlan& plan) {
  for (uint32_t i = 0; i < plan.objects.size(); ++i) {
    const PlanObject& listed = plan.objects[i];
    const auto [known, is_new] = objects.try_emplace(listed.key);
    Object& object = known->second;
    if (is_new) {
      object.common = listed.common;
      object.first_rank = rank;
      const auto tensor = tensor_ids.find(listed.key);
      if (tensor != tensor_ids.end()) {
        note(ErrorCode::kMismatch,
             rank_text(rank) + " has an object under the key of a tensor of " +
                 rank_text(tensors[tensor->second].first_rank()),
             listed.key);
      }
    } else if (object.common != listed.common) {
      note(ErrorCode::kMismatch,
           rank_text(object.first_rank) + " and " + rank_text(rank) +
               " disagree on whether an object is common to all ranks",
           listed.key);
    }
    if (object.common ? object.writer != kNone && object.writer <= rank : !listed.main_replica) {
      continue;
    }
    if (!object.common && object.writer != kNone) {
      note(ErrorCode::kInvalidArgument,
           "an object has two main replicas, on " + rank_text(object.writer) + " and on " +
               rank_text(rank),
           listed.key);
    }
    object.writer = rank;
    object.index = i;
  }
}

void SavePlanner::State::validate() const {
  for (size_t rank = 0; rank < added.size(); ++rank) {
    if (added[rank]) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "the plan of rank " + std::to_string(rank) + " is missing")
        .with_rank(static_cast<int>(rank));
  }
  if (first_problem) throw *first_problem;
  for (const Tensor& tensor : tensors) tensor.check_tiling();
  const std::pair<const std::string, Object>* orphan = nullptr;
  for (const auto& entry : objects) {
    if (entry.second.writer != kNone) continue;
    if (orphan == nullptr || entry.first < orphan->first) orphan = &entry;
  }
  if (orphan != nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "an object has no main replica; " +
                                                 rank_text(orphan->second.first_rank) +
                                                 " holds another one")
        .with_key(orphan->first);
  }
}

namespace {

// A chunk that waits for its owner, with what it is sorted by.
struct Waiting {
  uint64_t bytes = 0;
  uint32_t group = 0;  // its set of holders, or its place among the lists of listers
  uint32_t key_order = 0;
  uint32_t tensor = 0;
  uint32_t chunk = 0;
};

// Larger first, then by key and box.
void sort_waiting(std::vector<Waiting>& waiting, std::vector<Tensor>& tensors) {
  std::vector<uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return tensors[a].key() < tensors[b].key(); });
  std::vector<uint32_t> place(order.size());
  for (uint32_t i = 0; i < order.size(); ++i) place[order[i]] = i;
  for (Waiting& w : waiting) w.key_order = place[w.tensor];
  std::sort(waiting.begin(), waiting.end(), [&](const Waiting& a, const Waiting& b) {
    if (a.bytes != b.bytes) return a.bytes > b.bytes;
    if (a.key_order != b.key_order) return a.key_order < b.key_order;
    return tensors[a.tensor].box_before(a.chunk, b.chunk);
  });
}

}  // namespace

// The ranks that list it are just those that it names.
bool SavePlanner::State::is_by_rule(const Chunk& chunk) const {
  return chunk.holders != PlanChunk::kUnknown && chunk.listers == sets[chunk.holders]->size();
}

void SavePlanner::State::assign_by_rule() {
  std::vector<Waiting> waiting;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    for (uint32_t c = 0; c < tensors[t].size(); ++c) {
      const Chunk& chunk = tensors[t].chunk(c);
      if (chunk.listers < 2 || !is_by_rule(chunk)) continue;
      waiting.push_back({tensors[t].bytes(c), chunk.holders, 0, t, c});
    }
  }
  sort_waiting(waiting, tensors);
  std::vector<std::optional<HolderBalance>> balances(sets.size());
  for (const Waiting& w : waiting) {
    auto& balance = balances[w.group];
    if (!balance) balance.emplace(*sets[w.group]);
    const int owner = balance->give(w.bytes);
    tensors[w.tensor].chunk(w.chunk).last_rank = static_cast<uint32_t>(owner);
    load[static_cast<size_t>(owner)] += w.bytes;
  }
}

void SavePlanner::State::assign_single() {
  for (Tensor& tensor : tensors) {
    for (uint32_t c = 0; c < tensor.size(); ++c) {
      const Chunk& chunk = tensor.chunk(c);
      if (chunk.listers == 1) load[chunk.first_rank] += tensor.bytes(c);
    }
  }
}

void SavePlanner::State::assign_shared() {
  std::vector<Waiting> waiting;
  std::vector<size_t> begins = {0};  // of each waiting chunk's listers
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    for (uint32_t c = 0; c < tensors[t].size(); ++c) {
      Chunk& chunk = tensors[t].chunk(c);
      if (chunk.listers < 2 || is_by_rule(chunk)) continue;
      const auto group = static_cast<uint32_t>(waiting.size());
      waiting.push_back({tensors[t].bytes(c), group, 0, t, c});
      begins.push_back(begins.back() + chunk.listers);
      chunk.last_rank = group;
    }
  }
  std::vector<uint32_t> listers(begins.back());
  std::vector<size_t> ends(begins.begin(), begins.end() - 1);
  for (uint32_t rank = 0; rank < listings.size(); ++rank) {
    for (const Listing& listing : listings[rank]) {
      if (listing.chunk == kNone) continue;
      const Chunk& chunk = tensors[listing.tensor].chunk(listing.chunk);
      if (chunk.listers < 2 || is_by_rule(chunk)) continue;
      listers[ends[chunk.last_rank]++] = rank;
    }
  }
  sort_waiting(waiting, tensors);
  for (const Waiting& w : waiting) {
    const auto first = listers.begin() + static_cast<ptrdiff_t>(begins[w.group]);
    const auto last = listers.begin() + static_cast<ptrdiff_t>(begins[w.group + 1]);
    const uint32_t owner =
        *std::min_element(first, last, [&](uint32_t a, uint32_t b) { return load[a] < load[b]; });
    load[owner] += w.bytes;
    tensors[w.tensor].chunk(w.chunk).last_rank = owner;
  }
}

std::vector<Assignment> SavePlanner::State::result() const {
  std::vector<Assignment> assignments(listings.size());
  for (uint32_t rank = 0; rank < listings.size(); ++rank) {
    const std::vector<Listing>& mine = listings[rank];
    for (uint32_t i = 0; i < mine.size(); ++i) {
      if (mine[i].chunk == kNone) continue;
      const Chunk& chunk = tensors[mine[i].tensor].chunk(mine[i].chunk);
      if (chunk.last_rank == rank) assignments[rank].chunks.push_back(i);
    }
  }
  for (const Tensor& tensor : tensors) {
    if (tensor.empty_rank == kNone) continue;
    std::vector<uint32_t>& chunks = assignments[tensor.empty_rank].chunks;
    chunks.insert(std::lower_bound(chunks.begin(), chunks.end(), tensor.empty_chunk),
                  tensor.empty_chunk);
  }
  for (const auto& [key, object] : objects) {
    assignments[object.writer].objects.push_back(object.index);
  }
  for (Assignment& assignment : assignments) {
    std::sort(assignment.objects.begin(), assignment.objects.end());
  }
  return assignments;
}

SavePlanner::SavePlanner(int world_size) {
  if (world_size < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "world_size " + std::to_string(world_size) + " is less than 1");
  }
  state_ = std::make_unique<State>(world_size);
}

SavePlanner::~SavePlanner() = default;

void SavePlanner::add(int rank, const LocalSavePlan& plan) {
  State& state = *state_;
  if (rank < 0 || static_cast<size_t>(rank) >= state.added.size()) {
    throw Error(ErrorCode::kInvalidArgument, "rank " + std::to_string(rank) +
                                                 " is outside a world of " +
                                                 std::to_string(state.added.size()) + " ranks");
  }
  const auto r = static_cast<uint32_t>(rank);
  if (state.added[r]) {
    throw Error(ErrorCode::kInvalidArgument,
                "the plan of rank " + std::to_string(rank) + " is added twice");
  }
  state.added[r] = true;
  state.add_tensors(r, plan);
  state.add_sets(plan);
  state.add_chunks(r, plan);
  state.add_objects(r, plan);
}

std::vector<Assignment> SavePlanner::finish() {
  state_->validate();
  state_->load.assign(state_->listings.size(), 0);
  state_->assign_by_rule();
  state_->assign_single();
  state_->assign_shared();
  return state_->result();
}

std::vector<Assignment> plan_save(std::span<const LocalSavePlan> plans) {
  SavePlanner planner(static_cast<int>(plans.size()));
  for (size_t rank = 0; rank < plans.size(); ++rank)
    planner.add(static_cast<int>(rank), plans[rank]);
  return planner.finish();
}

}  // namespace tilestone
