// The lengths of the lists in a state dict, to find lists that no load can give back. The elements
// of a list have no names, so ranks whose lists have different lengths mean different things by one
// index. If such a list has a part that is the same on all ranks (a common value), that part is
// saved by index.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilestone/base/bytes.h"
#include "tilestone/state/state_dict.h"

namespace tilestone {

struct ListLength {
  std::string path;      // dotted
  uint64_t length = 0;   // without what is not saved
  uint64_t dropped = 0;  // its elements that are not saved (LocalNonpersistent)
  // Somewhere below it:
  bool has_common = false;   // a value or a plain tensor, or an empty container
  bool has_sharded = false;  // a sharded tensor or object
  // It contains, at any depth of lists, a dict, a tensor or a sharded entity.
  bool is_descended = false;
};

// The lists of a tree whose factories are built, with what is not saved, in its order. Lists of
// values alone inside lists are left out, and so is what is deeper than 16 levels or comes after
// 4,096 lists.
std::vector<ListLength> list_lengths(const StateDict& state);

// The same for the same lists, except that those which only have sharded entities don't count. 0:
// there are none that count.
uint64_t hash_of(const std::vector<ListLength>& lists);

// As the functions of base/both_ways.h.
void walk_lists(ByteWriter& out, const std::vector<ListLength>& lists);
void walk_lists(ByteReader& in, std::vector<ListLength>& lists);

// Compares the lists of the ranks. Throws Error(kMismatch), naming path and ranks, if a list with
// common values does not have the same length on all ranks that have it, neither with nor without
// what is not saved. A list that is one value
// on every rank may have another length, like any other value. by_sharded: only lists with sharded
// entities are taken apart (Megatron-Core's dialect).
void expect_same_lengths(const std::vector<std::vector<ListLength>>& by_rank, bool by_sharded);

}  // namespace tilestone
