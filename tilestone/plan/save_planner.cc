// How chunks are assigned by exchange. add() appends each rank's listings of boxes to their
// tensors' listings. This touches memory once and needs no look-ups. Then each tensor's listings
// are sorted by box, so that those of one box, a chunk, are adjacent. The chunks are checked, and
// each one gets a writer:
//  1. Only one rank lists it: that rank.
//  2. Several ranks list it with a hash of its content (planner_contents.cc): the lowest of them.
//  3. Several ranks list it and name exactly these ranks as its holders: the holder that each of
//     them would choose by rule (save_rule.cc).
//  4. Several ranks list it in any other way: the one with the least load. These come last, the
//     largest first.
// If ranks make copies, 3 and 4 are one case: copies are load of all ranks of a group.
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "tilestone/plan/balance_internal.h"
#include "tilestone/plan/plan_sink_internal.h"
#include "tilestone/plan/planner_contents_internal.h"
#include "tilestone/plan/planner_internal.h"
#include "tilestone/plan/texts_internal.h"

namespace tilestone {

using planner::Chunks;
using planner::Contents;
using planner::kNone;
using planner::Listing;
using planner::ObjectHolder;
using planner::Tensor;

namespace {

struct Object {
  bool common = false;
  uint32_t first_rank = kNone;
  uint32_t writer = kNone;  // the lowest rank for a common object, else the main replica's rank
  uint32_t index = 0;       // index into the writer's plan
  std::vector<ObjectHolder> holders;  // those whose content is known
};

// A chunk that several ranks list, with its sort key.
struct Waiting {
  uint64_t bytes = 0;
  uint32_t tensor = 0;
  uint32_t holders = PlanChunk::kUnknown;  // known if exactly these ranks list it
  size_t begin = 0;                        // start of its group in the tensor's listings
};

}  // namespace

struct SavePlanner::State final : PlanSink {
  explicit State(int world)
      : added(static_cast<size_t>(world), false),
        chunk_holders(added.size()),
        contents(added.size()),
        owned(added.size()),
        assignments(added.size()) {}

  // Parts of the plan of the rank that is being added.
  void tensor_table(const std::vector<PlanTensor>& table, bool same) override;
  void holder_set(std::vector<int> ranks) override;
  void chunk(const PlanChunk& listed) override;
  void object(const PlanObject& listed) override;
  void note_holders(uint32_t index, uint32_t set);

  void check_all_added() const;
  void assign_tensor(uint32_t id);
  void assign_chunk(uint32_t id, size_t begin, std::span<const Listing> group, uint64_t bytes);
  uint32_t holders_of(const Listing& listing) const;
  uint32_t common_holders(std::span<const Listing> group) const;
  bool is_contested(std::span<const Listing> group) const;
  void contest(std::span<const Listing> group);
  void check_objects() const;
  void sort_waiting();
  void assign_by_rule();
  void assign_with_copies();
  void assign_shared();
  void assign_empty();
  void assign_objects();
  void copy_object(const Object& object);
  void give(const Listing& listing, uint64_t bytes);
  void note_copies(std::span<const Listing> group, uint32_t owner);

  planner::TensorTable tensors;
  std::vector<bool> added;
  std::map<std::vector<int>, uint32_t> set_ids;
  std::vector<const std::vector<int>*> sets;  // keys of set_ids
  // By rank and chunk: an index into `sets`, of a set that contains the rank. A rank's list ends
  // after the last chunk that names its holders.
  std::vector<std::vector<uint32_t>> chunk_holders;
  Contents contents;
  std::unordered_map<std::string, Object> objects;
  std::map<uint32_t, std::vector<int>> groups;  // by rank: whose chunks it copies, ascending

  // Used by finish().
  planner::OwnedChunks owned;
  std::vector<Assignment> assignments;
  Chunks chunks;
  std::vector<uint64_t> load;  // bytes, by rank
  std::vector<Waiting> waiting;
  std::vector<Listing> scratch;

  PlanDecoder decoder;
  // For the rank that is being added, by the rank's own indices.
  uint32_t rank = 0;
  uint32_t chunk_index = 0;
  uint32_t object_index = 0;
  std::vector<uint32_t> local_sets;
};

void SavePlanner::State::tensor_table(const std::vector<PlanTensor>& table, bool same) {
  tensors.add(table, same, rank, [&](const Tensor& tensor) {
    const auto object = objects.find(tensor.key());
    if (object == objects.end()) return;
    planner::refuse_as_both(tensor.key(), object->second.first_rank, rank);
  });
}

void SavePlanner::State::holder_set(std::vector<int> ranks) {
  const auto next = static_cast<uint32_t>(sets.size());
  const auto [known, is_new] = set_ids.emplace(std::move(ranks), next);
  if (is_new) sets.push_back(&known->first);
  local_sets.push_back(known->second);
}

// The box lies inside the tensor in the rank's table.
void SavePlanner::State::chunk(const PlanChunk& listed) {
  const uint32_t index = chunk_index++;
  contents.add_chunk(rank, index, listed.content);
  Tensor& tensor = tensors.of_plan(listed.tensor);
  if (!tensor.add(listed.box, rank, index)) {
    if (tensor.has_elements() || tensor.empty_rank <= rank) return;
    tensor.empty_rank = rank;
    tensor.empty_chunk = index;
  } else if (listed.holders != PlanChunk::kUnknown) {
    note_holders(index, local_sets.at(listed.holders));
  }
}

void SavePlanner::State::note_holders(uint32_t index, uint32_t set) {
  const std::vector<int>& ranks = *sets[set];
  if (!std::binary_search(ranks.begin(), ranks.end(), static_cast<int>(rank))) return;
  std::vector<uint32_t>& mine = chunk_holders[rank];
  mine.resize(index + size_t{1}, PlanChunk::kUnknown);
  mine[index] = set;
}

void SavePlanner::State::object(const PlanObject& listed) {
  const uint32_t index = object_index++;
  const auto [known, is_new] = objects.try_emplace(listed.key);
  Object& object = known->second;
  if (listed.content != 0) object.holders.push_back({rank, index, listed.content});
  if (is_new) {
    object.common = listed.common;
    object.first_rank = rank;
    const Tensor* const tensor = tensors.find(listed.key);
    if (tensor != nullptr) planner::refuse_as_both(listed.key, tensor->first_rank(), rank);
  } else if (object.common != listed.common) {
    throw Error(ErrorCode::kMismatch, rank_text(object.first_rank) + " and " + rank_text(rank) +
                                          " disagree on whether an object is common to all ranks")
        .with_key(listed.key);
  }
  if (object.common ? object.writer != kNone && object.writer <= rank : !listed.main_replica) {
    return;
  }
  if (!object.common && object.writer != kNone) {
    throw Error(ErrorCode::kInvalidArgument, "an object has two main replicas, on " +
                                                 rank_text(object.writer) + " and on " +
                                                 rank_text(rank))
        .with_key(listed.key);
  }
  object.writer = rank;
  object.index = index;
}

void SavePlanner::State::check_all_added() const {
  const auto missing = std::find(added.begin(), added.end(), false);
  if (missing == added.end()) return;
  const auto first = static_cast<int>(missing - added.begin());
  throw Error(ErrorCode::kInvalidArgument,
              "the plan of rank " + std::to_string(first) + " is missing")
      .with_rank(first);
}

void SavePlanner::State::give(const Listing& listing, uint64_t bytes) {
  load[listing.rank] += bytes;
  owned.set(listing.rank, listing.index);
}

// Notes the ranks that list a chunk and copy what its owner writes.
void SavePlanner::State::note_copies(std::span<const Listing> group, uint32_t owner) {
  if (groups.empty()) return;
  for (const Listing& listing : group) {
    if (listing.rank == owner) continue;
    const auto found = groups.find(listing.rank);
    if (found == groups.end()) continue;
    const std::vector<int>& ranks = found->second;
    if (!std::binary_search(ranks.begin(), ranks.end(), static_cast<int>(owner))) continue;
    assignments[listing.rank].copies.push_back(listing.index);
  }
}

uint32_t SavePlanner::State::holders_of(const Listing& listing) const {
  const std::vector<uint32_t>& of_rank = chunk_holders[listing.rank];
  return listing.index < of_rank.size() ? of_rank[listing.index] : PlanChunk::kUnknown;
}

// The set of holders that all ranks listing the chunk name, if it consists of exactly these ranks.
uint32_t SavePlanner::State::common_holders(std::span<const Listing> group) const {
  const uint32_t holders = holders_of(group.front());
  const bool by_rule = holders != PlanChunk::kUnknown && group.size() == sets[holders]->size() &&
                       std::all_of(group.begin(), group.end(), [&](const Listing& listing) {
                         return holders_of(listing) == holders;
                       });
  return by_rule ? holders : PlanChunk::kUnknown;
}

// Whether a rank lists the chunk that is not among the holders that another one names.
bool SavePlanner::State::is_contested(std::span<const Listing> group) const {
  uint32_t last = PlanChunk::kUnknown;  // most ranks name the same holders as the previous one
  return std::any_of(group.begin(), group.end(), [&](const Listing& naming) {
    const uint32_t holders = holders_of(naming);
    if (holders == PlanChunk::kUnknown || holders == std::exchange(last, holders)) return false;
    const std::vector<int>& named = *sets[holders];
    return std::any_of(group.begin(), group.end(), [&](const Listing& listing) {
      return !std::binary_search(named.begin(), named.end(), static_cast<int>(listing.rank));
    });
  });
}

// The holders of one set have the same, so the lowest of them is compared.
void SavePlanner::State::contest(std::span<const Listing> group) {
  std::set<uint32_t> seen;
  std::vector<Listing> of_sets;
  for (const Listing& listing : group) {
    const uint32_t holders = holders_of(listing);
    if (holders != PlanChunk::kUnknown && !seen.insert(holders).second) continue;
    of_sets.push_back(listing);
  }
  contents.contest(of_sets);
}

// Checks a tensor, assigns the chunks that only one rank lists and adds the others to `waiting`.
void SavePlanner::State::assign_tensor(uint32_t id) {
  Tensor& tensor = tensors.all()[id];
  tensor.sort(scratch);
  const bool runs = tensor.is_tiled_by_runs();
  chunks.boxes.clear();
  chunks.ranks.clear();
  for (size_t begin = 0; begin < tensor.listings().size();) {
    const std::span<const Listing> group = tensor.group(begin);
    const Listing& any = group.front();
    if (!runs) {
      chunks.boxes.push_back(tensor.box(any));
      chunks.ranks.push_back(any.rank);
    }
    const uint64_t elements =
        runs ? any.last - any.first + 1 : static_cast<uint64_t>(chunks.boxes.back().numel());
    assign_chunk(id, begin, group, elements * itemsize(tensor.dtype()));
    begin += group.size();
  }
  if (tensor.has_elements() && !runs) {
    expect_tiling(tensor.key(), tensor.shape(), chunks, " holds ");
  }
}

void SavePlanner::State::assign_chunk(uint32_t id, size_t begin, std::span<const Listing> group,
                                      uint64_t bytes) {
  if (group.size() == 1) return give(group.front(), bytes);
  const auto twice =
      std::adjacent_find(group.begin(), group.end(),
                         [](const Listing& a, const Listing& b) { return a.rank == b.rank; });
  if (twice != group.end()) {
    throw Error(ErrorCode::kInvalidArgument, rank_text(twice->rank) + " lists box " +
                                                 to_string(tensors.all()[id].box(*twice)) +
                                                 " twice")
        .with_key(tensors.all()[id].key());
  }
  const uint32_t holders = common_holders(group);
  if (holders == PlanChunk::kUnknown && is_contested(group)) {
    contest(group);
  } else if (contents.are_known(group)) {
    contents.compare(tensors.all()[id].key(), group);
    give(group.front(), bytes);
    return note_copies(group, group.front().rank);
  }
  waiting.push_back({bytes, id, holders, begin});
}

void SavePlanner::State::check_objects() const {
  const std::pair<const std::string, Object>* orphan = nullptr;
  for (const auto& entry : objects) {
    if (entry.second.writer != kNone) continue;
    if (orphan == nullptr || entry.first < orphan->first) orphan = &entry;
  }
  if (orphan == nullptr) return;
  throw Error(ErrorCode::kInvalidArgument, "an object has no main replica; " +
                                               rank_text(orphan->second.first_rank) +
                                               " holds another replica")
      .with_key(orphan->first);
}

// Largest first, then by key and box.
void SavePlanner::State::sort_waiting() {
  std::vector<uint32_t> order(tensors.all().size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return tensors.all()[a].key() < tensors.all()[b].key();
  });
  std::vector<uint32_t> position(order.size());
  for (uint32_t i = 0; i < order.size(); ++i) position[order[i]] = i;
  std::sort(waiting.begin(), waiting.end(), [&](const Waiting& a, const Waiting& b) {
    if (a.bytes != b.bytes) return a.bytes > b.bytes;
    if (a.tensor != b.tensor) return position[a.tensor] < position[b.tensor];
    return a.begin < b.begin;
  });
}

void SavePlanner::State::assign_by_rule() {
  std::vector<std::optional<HolderBalance>> balances(sets.size());
  for (const Waiting& w : waiting) {
    if (w.holders == PlanChunk::kUnknown) continue;
    auto& balance = balances[w.holders];
    if (!balance) balance.emplace(*sets[w.holders]);
    const auto owner = static_cast<uint32_t>(balance->give(w.bytes));
    const std::span<const Listing> group = tensors.all()[w.tensor].group(w.begin);
    const auto listing = std::lower_bound(
        group.begin(), group.end(), owner,
        [](const Listing& candidate, uint32_t wanted) { return candidate.rank < wanted; });
    give(*listing, w.bytes);
    note_copies(group, owner);
  }
}

// With groups: what a rank of a group owns, the other holders in the group copy, so all of them get
// its bytes.
void SavePlanner::State::assign_with_copies() {
  struct Holders {
    uint64_t most = 0;               // the load of the most loaded one
    const Listing* least = nullptr;  // the one that owns the least
    std::vector<uint32_t> ranks;
  };
  std::map<std::vector<int>, uint32_t> group_ids;
  std::vector<uint32_t> group_of(added.size(), kNone);
  for (const auto& [r, ranks] : groups) {
    group_of[r] = group_ids.emplace(ranks, static_cast<uint32_t>(group_ids.size())).first->second;
  }
  std::vector<uint64_t> owned_bytes = load;  // by rank
  for (const Waiting& w : waiting) {
    const std::span<const Listing> listed = tensors.all()[w.tensor].group(w.begin);
    std::map<uint64_t, Holders> holders;  // by group; a rank without one is alone
    for (const Listing& listing : listed) {
      const uint32_t group = group_of[listing.rank];
      Holders& found = holders[group != kNone ? group : uint64_t{kNone} + listing.rank];
      found.most = std::max(found.most, load[listing.rank]);
      found.ranks.push_back(listing.rank);
      const bool less =
          found.least == nullptr || owned_bytes[listing.rank] < owned_bytes[found.least->rank];
      if (less) found.least = &listing;
    }
    const Holders& best =
        std::min_element(holders.begin(), holders.end(), [](const auto& a, const auto& b) {
          return a.second.most < b.second.most;
        })->second;
    for (const uint32_t r : best.ranks) load[r] += w.bytes;
    owned_bytes[best.least->rank] += w.bytes;
    owned.set(best.least->rank, best.least->index);
    note_copies(listed, best.least->rank);
  }
}

void SavePlanner::State::assign_shared() {
  for (const Waiting& w : waiting) {
    if (w.holders != PlanChunk::kUnknown) continue;
    const std::span<const Listing> group = tensors.all()[w.tensor].group(w.begin);
    const Listing& least = *std::min_element(
        group.begin(), group.end(),
        [&](const Listing& a, const Listing& b) { return load[a.rank] < load[b.rank]; });
    give(least, w.bytes);
    note_copies(group, least.rank);
  }
}

void SavePlanner::State::assign_empty() {
  for (const Tensor& tensor : tensors.all()) {
    if (tensor.empty_rank == kNone) continue;
    owned.set(tensor.empty_rank, tensor.empty_chunk);
  }
}

void SavePlanner::State::assign_objects() {
  for (auto& [key, object] : objects) {
    std::sort(object.holders.begin(), object.holders.end(),
              [](const ObjectHolder& a, const ObjectHolder& b) { return a.rank < b.rank; });
    assignments[object.writer].objects.push_back(object.index);
    contents.compare(key, object.writer, object.holders);
    if (!groups.empty()) copy_object(object);
  }
}

void SavePlanner::State::copy_object(const Object& object) {
  const auto is_writer = [&](const ObjectHolder& holder) { return holder.rank == object.writer; };
  const auto writer = std::find_if(object.holders.begin(), object.holders.end(), is_writer);
  if (writer == object.holders.end()) return;
  for (const ObjectHolder& holder : object.holders) {
    if (is_writer(holder) || holder.content != writer->content) continue;
    if (groups.contains(holder.rank))
      assignments[holder.rank].object_copies.push_back(holder.index);
  }
}

SavePlanner::SavePlanner(int world_size) {
  if (world_size < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                "world_size " + std::to_string(world_size) + " is less than 1");
  }
  state_ = std::make_unique<State>(world_size);
}

SavePlanner::~SavePlanner() = default;

void SavePlanner::begin(int rank) {
  State& state = *state_;
  if (rank < 0 || static_cast<size_t>(rank) >= state.added.size()) {
    throw Error(ErrorCode::kInvalidArgument, "rank " + std::to_string(rank) +
                                                 " is outside a world of " +
                                                 std::to_string(state.added.size()) + " ranks");
  }
  state.rank = static_cast<uint32_t>(rank);
  if (state.added[state.rank]) {
    throw Error(ErrorCode::kInvalidArgument,
                "the plan of rank " + std::to_string(rank) + " is added twice");
  }
  state.added[state.rank] = true;
  state.chunk_index = 0;
  state.object_index = 0;
  state.local_sets.clear();
}

void SavePlanner::end() {
  State& state = *state_;
  if (state.chunk_index > planner::kMaxChunks) {
    throw Error(ErrorCode::kInvalidArgument, "a rank lists more than 2^31 chunks")
        .with_rank(static_cast<int>(state.rank));
  }
  state.owned.note_count(state.rank, state.chunk_index);
  state.contents.end_rank(state.rank, state.object_index, state.chunk_index);
}

void SavePlanner::add_encoded(int rank, ByteView plan) {
  begin(rank);
  state_->decoder.decode(plan, *state_);
  end();
}

void SavePlanner::set_group(int rank, const std::vector<int>& group) {
  const auto world = static_cast<int>(state_->added.size());
  state_->groups[static_cast<uint32_t>(rank)] = checked_group(rank, world, group);
}

std::vector<Assignment> SavePlanner::finish() {
  State& state = *state_;
  state.check_all_added();
  state.load.assign(state.added.size(), 0);
  state.owned.make_room();
  for (uint32_t id = 0; id < state.tensors.all().size(); ++id) state.assign_tensor(id);
  state.check_objects();
  state.sort_waiting();
  if (state.groups.empty()) {
    state.assign_by_rule();
    state.assign_shared();
  } else {
    state.assign_with_copies();
  }
  state.assign_empty();
  state.assign_objects();
  for (uint32_t r = 0; r < state.assignments.size(); ++r) {
    Assignment& mine = state.assignments[r];
    mine.chunks = state.owned.of(r);
    std::sort(mine.objects.begin(), mine.objects.end());
    std::sort(mine.copies.begin(), mine.copies.end());
    std::sort(mine.object_copies.begin(), mine.object_copies.end());
  }
  return std::move(state.assignments);
}

const std::vector<DifferingContent>& SavePlanner::differing() const {
  return state_->contents.differing();
}
const std::vector<ContestedChunk>& SavePlanner::contested() const {
  return state_->contents.contested();
}
void SavePlanner::note_groups() { state_->contents.note_groups(); }
std::vector<ContentGroups> SavePlanner::content_groups() { return state_->contents.groups(); }

std::vector<Assignment> plan_save(std::span<const LocalSavePlan> plans) {
  SavePlanner planner(static_cast<int>(plans.size()));
  for (size_t rank = 0; rank < plans.size(); ++rank)
    planner.add_encoded(static_cast<int>(rank), plans[rank].encode());
  return planner.finish();
}

}  // namespace tilestone
