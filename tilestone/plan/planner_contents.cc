#include <algorithm>
#include <utility>

#include "tilestone/base/checksum.h"
#include "tilestone/plan/planner_contents_internal.h"

namespace tilestone::planner {
namespace {

// The same number for the same ranks.
template <typename Holders>
uint64_t group_of(const Holders& holders) {
  ByteWriter out;
  for (const auto& holder : holders) out.varint(holder.rank);
  return std::max<uint64_t>(xxh3_64(out.bytes()), 1);
}

}  // namespace

void Contents::add_chunk(uint32_t rank, uint32_t index, uint64_t content) {
  if (content == 0) return;
  std::vector<uint64_t>& mine = chunks_[rank];
  mine.resize(index + size_t{1}, 0);
  mine[index] = content;
}

void Contents::end_rank(uint32_t rank, size_t objects, size_t chunks) {
  if (!notes_groups_) return;
  groups_[rank].objects.assign(objects, 0);
  groups_[rank].chunks.assign(chunks, 0);
}

uint64_t Contents::of(const Listing& listing) const {
  const std::vector<uint64_t>& of_rank = chunks_[listing.rank];
  return listing.index < of_rank.size() ? of_rank[listing.index] : 0;
}

bool Contents::are_known(std::span<const Listing> group) const {
  return std::all_of(group.begin(), group.end(),
                     [&](const Listing& listing) { return of(listing) != 0; });
}

void Contents::note_group(std::span<const Listing> group) {
  if (!notes_groups_) return;
  const uint64_t id = group_of(group);
  for (const Listing& listing : group) groups_[listing.rank].chunks[listing.index] = id;
}

void Contents::compare(const std::string& key, std::span<const Listing> group) {
  note_group(group);
  DifferingContent found{key, static_cast<int>(group.front().rank), {}, false};
  for (const Listing& listing : group) {
    if (of(listing) != of(group.front())) found.others.push_back(static_cast<int>(listing.rank));
  }
  if (!found.others.empty()) differing_.push_back(std::move(found));
}

void Contents::contest(std::span<const Listing> of_sets) {
  note_group(of_sets);
  ContestedChunk& chunk = contested_.emplace_back();
  for (const Listing& listing : of_sets) {
    chunk.holders.push_back({static_cast<int>(listing.rank), listing.index});
  }
}

void Contents::compare(const std::string& key, uint32_t writer,
                       std::span<const ObjectHolder> holders) {
  if (holders.size() < 2) return;
  if (notes_groups_) {
    const uint64_t id = group_of(holders);
    for (const ObjectHolder& holder : holders) groups_[holder.rank].objects[holder.index] = id;
  }
  const auto is_writer = [&](const ObjectHolder& holder) { return holder.rank == writer; };
  const auto saved = std::find_if(holders.begin(), holders.end(), is_writer);
  if (saved == holders.end()) return;
  DifferingContent found{key, static_cast<int>(writer), {}, false};
  for (const ObjectHolder& holder : holders) {
    if (holder.content != saved->content) found.others.push_back(static_cast<int>(holder.rank));
  }
  if (!found.others.empty()) differing_.push_back(std::move(found));
}

const std::vector<DifferingContent>& Contents::differing() {
  if (!std::exchange(sorted_, true)) sort_by_key(differing_);
  return differing_;
}

std::vector<ContentGroups> Contents::groups() { return std::move(groups_); }

}  // namespace tilestone::planner
