#include <algorithm>

#include "tilestone/base/size_text.h"
#include "tilestone/comm/operation_internal.h"

namespace tilestone::comm_internal {
namespace {

std::string prefix(std::string_view operation) { return std::string(operation) + ": "; }

}  // namespace

void check_parts(std::string_view operation, size_t parts, int size) {
  if (parts == static_cast<size_t>(size)) return;
  throw Error(ErrorCode::kInvalidArgument, prefix(operation) + "found " + std::to_string(parts) +
                                               " parts, expected one for each of " +
                                               std::to_string(size) + " ranks");
}

Error timed_out(std::string_view operation, const std::vector<int>& missing) {
  return Error(ErrorCode::kTimeout, prefix(operation) + "the deadline passed while waiting for " +
                                        ranks_text(missing, kNamedRanks))
      .with_rank(missing.front())
      .with_hint("check what that rank was doing, or use a longer timeout");
}

Error rank_failed(std::string_view operation, const std::vector<int>& gone, std::string_view why) {
  std::string message = prefix(operation) + ranks_text(gone, kNamedRanks) +
                        (gone.size() == 1 ? " is" : " are") + " gone";
  if (!why.empty()) message.append(": ").append(why);
  return Error(ErrorCode::kRankFailed, std::move(message)).with_rank(gone.front());
}

int tree_parent(int rank) { return rank == 0 ? -1 : rank & (rank - 1); }

std::vector<int> tree_children(int rank, int size) {
  // A rank's children differ from it in one bit below its lowest set bit.
  std::vector<int> children;
  for (int bit = 1; (rank & bit) == 0 && bit < size - rank; bit <<= 1) {
    children.push_back(rank + bit);
  }
  std::reverse(children.begin(), children.end());
  return children;
}

}  // namespace tilestone::comm_internal
