// What the communicators share: argument checks, the wording of errors, the broadcast tree.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone::comm_internal {

// Throw kInvalidArgument.
void check_size(std::string_view group, int size);                     // at least one rank
void check_root(std::string_view operation, int root, int size);       // 0 <= root < size
void check_parts(std::string_view operation, size_t parts, int size);  // one part a rank

// "rank 3", "ranks 3 and 7", "ranks 3, 7, 9, 11, 20, 21, 30, 31 and 12 more". Not empty.
std::string rank_list(const std::vector<int>& ranks);

// kTimeout and kRankFailed; rank() is the first of `missing`. `why` may be empty.
Error timed_out(std::string_view operation, const std::vector<int>& missing);
Error rank_failed(std::string_view operation, const std::vector<int>& gone, std::string_view why);

// A binomial tree over ranks 0 .. size-1 with `root` at its top: every other rank has one parent,
// and no rank is more than log2(size) steps from the root. The root's parent is -1. Children come
// with the deepest subtree first.
int tree_parent(int rank, int root, int size);
std::vector<int> tree_children(int rank, int root, int size);

}  // namespace tilestone::comm_internal
