#include <algorithm>

#include "tilestone/comm/operation_internal.h"

namespace tilestone::comm_internal {
namespace {

constexpr size_t kNamedRanks = 8;

std::string prefix(std::string_view operation) { return std::string(operation) + ": "; }

// Convert between a rank and its position in the tree, whose root has position 0.
int to_position(int rank, int root, int size) { return (rank - root + size) % size; }
int to_rank(int position, int root, int size) { return (position + root) % size; }

}  // namespace

void check_root(std::string_view operation, int root, int size) {
  if (root >= 0 && root < size) return;
  throw Error(ErrorCode::kInvalidArgument, prefix(operation) + "root is " + std::to_string(root) +
                                               ", expected a rank from 0 to " +
                                               std::to_string(size - 1));
}

void check_parts(std::string_view operation, size_t parts, int size) {
  if (parts == static_cast<size_t>(size)) return;
  throw Error(ErrorCode::kInvalidArgument, prefix(operation) + "found " + std::to_string(parts) +
                                               " parts, expected one for each of " +
                                               std::to_string(size) + " ranks");
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  const size_t named = std::min(ranks.size(), kNamedRanks);
  for (size_t i = 0; i < named; ++i) {
    if (i > 0) out += i + 1 == ranks.size() ? " and " : ", ";
    out += std::to_string(ranks[i]);
  }
  if (ranks.size() > named) out += " and " + std::to_string(ranks.size() - named) + " more";
  return out;
}

Error timed_out(std::string_view operation, const std::vector<int>& missing) {
  return Error(ErrorCode::kTimeout,
               prefix(operation) + "the deadline passed while waiting for " + rank_list(missing))
      .with_rank(missing.front())
      .with_hint("check what that rank was doing, or use a longer timeout");
}

Error rank_failed(std::string_view operation, const std::vector<int>& gone, std::string_view why) {
  std::string message =
      prefix(operation) + rank_list(gone) + (gone.size() == 1 ? " is" : " are") + " gone";
  if (!why.empty()) message.append(": ").append(why);
  return Error(ErrorCode::kRankFailed, std::move(message)).with_rank(gone.front());
}

int tree_parent(int rank, int root, int size) {
  const int position = to_position(rank, root, size);
  return position == 0 ? -1 : to_rank(position & (position - 1), root, size);
}

std::vector<int> tree_children(int rank, int root, int size) {
  // A position's children differ from it in one bit below its lowest set bit.
  const int position = to_position(rank, root, size);
  std::vector<int> children;
  for (int bit = 1; (position & bit) == 0 && bit < size - position; bit <<= 1) {
    children.push_back(to_rank(position + bit, root, size));
  }
  std::reverse(children.begin(), children.end());
  return children;
}

}  // namespace tilestone::comm_internal
