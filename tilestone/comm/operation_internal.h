// Functions that the communicators share: argument checks, error messages, the broadcast tree.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "tilestone/base/error.h"

namespace tilestone::comm_internal {

inline constexpr size_t kNamedRanks = 8;  // in an error

// Throws Error(kInvalidArgument) unless there is one part per rank.
void check_parts(std::string_view operation, size_t parts, int size);

// Make an Error(kTimeout) and an Error(kRankFailed); its rank() is the first of the ranks, which
// must not be empty. `why` may be empty.
Error timed_out(std::string_view operation, const std::vector<int>& missing);
Error rank_failed(std::string_view operation, const std::vector<int>& gone, std::string_view why);

// A binomial tree over the ranks 0 to size - 1 with 0 at its top. Every other rank has one parent;
// that of 0 is -1. No rank is more than log2(size) steps from 0. The child with the deepest subtree
// comes first.
int tree_parent(int rank);
std::vector<int> tree_children(int rank, int size);

}  // namespace tilestone::comm_internal
