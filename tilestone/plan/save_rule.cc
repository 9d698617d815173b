#include <algorithm>
#include <numeric>
#include <tuple>

#include "tilestone/base/error.h"
#include "tilestone/plan/balance_internal.h"
#include "tilestone/plan/contents.h"
#include "tilestone/plan/save_plan.h"

namespace tilestone {
namespace {

uint64_t bytes_of(const LocalSavePlan& plan, const PlanChunk& chunk) {
  return static_cast<uint64_t>(chunk.box.numel()) * itemsize(plan.tensors[chunk.tensor].dtype);
}

// By size, then by key and box.
void sort_chunks(const LocalSavePlan& plan, bool largest_first, std::vector<uint32_t>& chunks) {
  std::sort(chunks.begin(), chunks.end(), [&](uint32_t i, uint32_t j) {
    const PlanChunk& a = plan.chunks[i];
    const PlanChunk& b = plan.chunks[j];
    const uint64_t x = bytes_of(plan, a);
    const uint64_t y = bytes_of(plan, b);
    if (x != y) return largest_first ? x > y : x < y;
    if (a.tensor != b.tensor) return plan.tensors[a.tensor].key < plan.tensors[b.tensor].key;
    return a.box < b.box;
  });
}

void check_rank(const LocalSavePlan& plan, const PlanChunk& chunk, int rank) {
  const std::vector<int>& holders = plan.holder_sets[chunk.holders];
  if (std::binary_search(holders.begin(), holders.end(), rank)) return;
  throw Error(ErrorCode::kInvalidArgument, "the declared holders of box " + to_string(chunk.box) +
                                               " do not include rank " + std::to_string(rank) +
                                               ", which holds it")
      .with_key(plan.tensors[chunk.tensor].key)
      .with_rank(rank);
}

// A tensor without elements has one empty chunk. The lowest holder writes it if the holders are
// known, else the main replica.
bool writes_empty(const LocalSavePlan& plan, const PlanChunk& chunk, int rank) {
  if (chunk.holders == PlanChunk::kUnknown) return chunk.main_replica;
  return plan.holder_sets[chunk.holders].front() == rank;
}

// Whether each chunk is a whole tensor with elements and each object has its main replica here.
bool is_simple(const LocalSavePlan& plan) {
  std::vector<bool> listed(plan.tensors.size(), false);
  for (const PlanChunk& chunk : plan.chunks) {
    if (chunk.box.empty() || listed[chunk.tensor]) return false;
    if (chunk.box != Box::whole(plan.tensors[chunk.tensor].global_shape)) return false;
    listed[chunk.tensor] = true;
  }
  if (std::find(listed.begin(), listed.end(), false) != listed.end()) return false;
  return std::all_of(plan.objects.begin(), plan.objects.end(),
                     [](const PlanObject& object) { return object.common || object.main_replica; });
}

}  // namespace

std::vector<int> checked_group(int rank, int world_size, std::vector<int> group) {
  std::sort(group.begin(), group.end());
  const auto refuse = [&](const std::string& problem) {
    throw Error(ErrorCode::kInvalidArgument,
                "copies.group of rank " + std::to_string(rank) + " " + problem)
        .with_rank(rank);
  };
  if (!std::binary_search(group.begin(), group.end(), rank)) refuse("does not include that rank");
  const auto twice = std::adjacent_find(group.begin(), group.end());
  if (twice != group.end()) refuse("names rank " + std::to_string(*twice) + " twice");
  for (const int outside : {group.front(), group.back()}) {
    if (outside >= 0 && outside < world_size) continue;
    refuse("names rank " + std::to_string(outside) + ", which is outside a world of " +
           std::to_string(world_size) + " ranks");
  }
  return group;
}

Assignment plan_save_alone(const LocalSavePlan& plan) {
  if (!is_simple(plan)) return plan_save({&plan, 1}).front();
  Assignment all;
  all.chunks.resize(plan.chunks.size());
  std::iota(all.chunks.begin(), all.chunks.end(), 0);
  all.objects.resize(plan.objects.size());
  std::iota(all.objects.begin(), all.objects.end(), 0);
  return all;
}

namespace {

// Assigns the chunks of one set of holders: this rank writes them, or copies what a rank of its
// group writes.
void assign_held(const LocalSavePlan& plan, std::span<const int> holders,
                 std::vector<uint32_t>& chunks, int rank, std::span<const int> group,
                 Assignment& mine) {
  if (chunks.empty()) return;
  sort_chunks(plan, true, chunks);
  HolderBalance balance(holders);
  for (const uint32_t i : chunks) {
    const PlanChunk& chunk = plan.chunks[i];
    const int owner =
        is_compared(plan, chunk) ? holders.front() : balance.give(bytes_of(plan, chunk));
    if (owner == rank) {
      mine.chunks.push_back(i);
    } else if (std::binary_search(group.begin(), group.end(), owner)) {
      mine.copies.push_back(i);
    }
  }
}

}  // namespace

Assignment plan_save_by_rule(const LocalSavePlan& plan, int rank, std::span<const int> group,
                             bool group_is_world) {
  Assignment mine;
  std::vector<std::vector<uint32_t>> by_set(plan.holder_sets.size());
  std::vector<bool> empty_written(plan.tensors.size(), false);
  for (uint32_t i = 0; i < plan.chunks.size(); ++i) {
    const PlanChunk& chunk = plan.chunks[i];
    if (chunk.holders != PlanChunk::kUnknown) check_rank(plan, chunk, rank);
    if (chunk.box.empty()) {
      if (numel(plan.tensors[chunk.tensor].global_shape) != 0) continue;
      if (empty_written[chunk.tensor] || !writes_empty(plan, chunk, rank)) continue;
      empty_written[chunk.tensor] = true;
      mine.chunks.push_back(i);
    } else if (chunk.holders != PlanChunk::kUnknown) {
      by_set[chunk.holders].push_back(i);
    } else if (chunk.main_replica) {
      mine.chunks.push_back(i);
    } else if (group_is_world || (chunk.near_main && !group.empty())) {
      mine.copies.push_back(i);
    }
  }
  for (size_t s = 0; s < by_set.size(); ++s) {
    assign_held(plan, plan.holder_sets[s], by_set[s], rank, group, mine);
  }
  std::sort(mine.chunks.begin(), mine.chunks.end());
  std::sort(mine.copies.begin(), mine.copies.end());
  for (uint32_t i = 0; i < plan.objects.size(); ++i) {
    const PlanObject& object = plan.objects[i];
    if (object.common ? rank == 0 : object.main_replica) {
      mine.objects.push_back(i);
    } else if (object.content != 0 && !group.empty()) {
      mine.object_copies.push_back(i);
    }
  }
  return mine;
}

uint64_t limit_copies(const LocalSavePlan& plan, uint64_t max_bytes, Assignment& assignment) {
  std::vector<uint32_t>& chunks = assignment.copies;
  std::vector<uint32_t>& objects = assignment.object_copies;
  sort_chunks(plan, false, chunks);
  std::sort(objects.begin(), objects.end(), [&](uint32_t i, uint32_t j) {
    const PlanObject& a = plan.objects.at(i);
    const PlanObject& b = plan.objects.at(j);
    return std::tie(a.bytes, a.key) < std::tie(b.bytes, b.key);
  });
  uint64_t bytes = 0;
  size_t chunk = 0, object = 0;
  while (chunk < chunks.size() || object < objects.size()) {
    const uint64_t of_chunk =
        chunk < chunks.size() ? bytes_of(plan, plan.chunks.at(chunks[chunk])) : UINT64_MAX;
    const uint64_t of_object =
        object < objects.size() ? plan.objects[objects[object]].bytes : UINT64_MAX;
    const uint64_t next = std::min(of_chunk, of_object);
    if (next > max_bytes - bytes) break;  // the remaining ones are at least as large
    bytes += next;
    ++(of_object <= of_chunk ? object : chunk);
  }
  chunks.resize(chunk);
  objects.resize(object);
  std::sort(chunks.begin(), chunks.end());
  std::sort(objects.begin(), objects.end());
  return bytes;
}

}  // namespace tilestone
